"""A simulated executor that prints when the first plan of each epoch comes: `python -m cold_start.executor`.

Its vocabulary can be as large as a model's, as reading one takes a scheduler time.
"""

import argparse
import asyncio
import time

from paceline.plan.values import BatchPlan
from paceline_executor.config import Config, parse_config
from paceline_executor.link.engine import Engine, Ticket
from paceline_executor.link.service import ExecutorService, ServiceConfig
from paceline_executor.loading import load_simulated
from paceline_executor.runner.step_times import StepTimes


class _TellingEngine(Engine):
    """An engine that tells when an epoch begins."""

    _epoch = 0

    def launch(self, plan: BatchPlan) -> Ticket:
        """Launch a plan."""
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            print(f"first plan of an epoch at {time.time():.6f}", flush=True)
        return super().launch(plan)


def main() -> None:
    """Run until killed; what is no option of this program is one of `paceline-executor`."""
    parser = argparse.ArgumentParser(prog="python -m cold_start.executor")
    parser.add_argument("--step-ms", type=float, required=True, help="the time of every step")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens, at least 259")
    options, others = parser.parse_known_args()
    config = parse_config(["--runner", "simulated", *others])
    asyncio.run(_serve(config, StepTimes(((1, options.step_ms * 1e6),)), options.vocab_size))


async def _serve(config: Config, step_times: StepTimes, vocab_size: int) -> None:
    service = ExecutorService(
        ServiceConfig("127.0.0.1", 0, None), lambda: load_simulated(config, step_times, vocab_size, _TellingEngine)
    )
    port, _ = await service.listen()
    await service.load()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await service.run()


if __name__ == "__main__":
    main()
