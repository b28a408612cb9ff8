"""A simulated executor that prints when the first plan of each epoch comes: `python -m cold_start.executor`.

Its vocabulary can be as large as a model's, as reading one takes a scheduler time.
"""

import argparse
import asyncio
import time

from paceline.plan.values import BatchPlan
from paceline_executor.link.engine import Engine, Ticket
from paceline_executor.testing.hash_executor import simulated_executor


class _TellingEngine(Engine):
    """An engine that tells when an epoch begins."""

    _epoch = 0

    def launch(self, plan: BatchPlan) -> Ticket:
        """Launch a plan."""
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            print(f"first plan of an epoch at {time.time():.6f}", flush=True)
        return super().launch(plan)


async def main() -> None:
    """Run until killed; what is no option of this program is one of `paceline-executor`."""
    parser = argparse.ArgumentParser(prog="python -m cold_start.executor")
    parser.add_argument("--step-ms", type=float, required=True, help="the time of every step")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens, at least 259")
    own, others = parser.parse_known_args()
    async with simulated_executor(
        *others, step_ms=own.step_ms, vocab_size=own.vocab_size, engine=_TellingEngine
    ) as executor:
        print(f"listening on {executor.address}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
