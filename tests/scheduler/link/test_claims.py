"""One scheduler has one claim, at all executors alike. In virtual time."""

from both_sides.audited import expected_output
from both_sides.deployment import Deployment, scenario
from paceline_scheduler.testing.requests import make_request

FIRST, SECOND = "executor:1", "executor:2"


@scenario
async def test_a_term_that_rises_rises_everywhere():
    """An executor that nobody could reach at the start has a higher term of a scheduler long gone: requests go on."""
    async with Deployment(FIRST, SECOND) as deployment:
        stream = await deployment.stranger(SECOND, "scheduler-z", 7)
        stream.cancel()
        deployment.network.freeze(SECOND)
        async with deployment.rig() as rig:
            await rig.until_ready(1)
            deployment[FIRST].time_scale = 20
            request = make_request(5, 200)
            rig.submit(request)
            await rig.until(lambda: len(rig.client.token_ids.get(request.handle, ())) > 5)
            deployment.network.start(SECOND)
            await rig.until_ready(2)
            assert {deployment[address].fence.holder.term for address in (FIRST, SECOND)} == {8}
            await rig.until(lambda: request.handle in rig.client.ended)
            assert tuple(rig.client.token_ids[request.handle]) == expected_output(request)
            assert rig.client.attempts[request.handle] == 1
