"""A request that makes steps fail, between a scheduler and an executor as they are: it fails, and nothing else does."""

from paceline_executor.link.fence import FenceTimes
from paceline_executor.link.service import ServiceConfig
from paceline_executor.testing.hash_executor import HASH_LIMITS, loaded, serving
from paceline_executor.testing.hash_runner import HashRunner, continuation
from paceline_scheduler.errors import StepFailedError
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.testing.requests import make_request
from paceline_scheduler.testing.rig import SchedulerRig

BAD_TOKEN = 999
NEVER_SILENT = FenceTimes(lease_ns=60_000_000_000)  # a busy machine is no reason to lose an executor here


class ShortOfMemory(HashRunner):
    """A runner for which steps that compute a certain token need more memory than there is."""

    def launch(self, batch):
        """Run the batch, or not."""
        if BAD_TOKEN in batch.token_ids:
            raise MemoryError("of the test")
        return super().launch(batch)


async def test_only_the_request_that_makes_steps_fail_fails():
    runner = ShortOfMemory(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size)
    config = ServiceConfig("127.0.0.1", 0, None, times=NEVER_SILENT)
    # Prompts of their own, because the bad token is one that others would come to now and then.
    good = [make_request([number, 10, 20], 12, model="hash", seed=number) for number in range(3)]
    bad = make_request([1, BAD_TOKEN, 2], 12, model="hash", seed=5)
    async with serving(lambda: loaded(runner), config) as (_, address), SchedulerRig(address, GrpcTransport()) as rig:
        await rig.until_ready()
        rig.submit(*good[:2])
        await rig.until(lambda: all(rig.client.token_ids.get(request.handle) for request in good[:2]))
        rig.submit(bad, good[2])
        await rig.until(lambda: rig.client.ended >= {request.handle for request in (*good, bad)})

    assert rig.client.failures.keys() == {bad.handle}
    error = rig.client.failures[bad.handle]
    assert isinstance(error, StepFailedError)
    assert "memory ran out" in str(error)
    for request in good:
        expected = continuation(
            request.prompt_token_ids.tolist(), 12, HASH_LIMITS.vocab_size, seed=request.sampling.seed
        )
        assert rig.client.token_ids[request.handle] == expected
