"""What executors do in the resume model: carry out plans in order, keep rows and records.

Follows `executor/paceline_executor/rows`. That only one scheduler's plans arrive is the attach model's business.
"""

from collections.abc import Iterator

from protocol_model.checker import Move
from protocol_model.resume_state import LENGTH, Executor, Faults, Plan, Result, Row, Safeguard, Verb


class ExecutorMoves:
    """The moves of executors, given which safeguards are on and whether all compute the same tokens."""

    def __init__(self, safeguards: frozenset[Safeguard], *, is_reproducible: bool) -> None:
        self._safeguards = safeguards
        self._is_reproducible = is_reproducible

    def carry_out(self, executor: Executor) -> Iterator[Move]:
        """Run the next plan. A stream that is cut still delivers what was sent before, or a part of it."""
        if executor.plans:
            plan = executor.plans[0]
            after = self._after(executor._replace(plans=executor.plans[1:]), plan)
            yield f"{named(executor)} carries out: {plan.verb.name.lower()} {plan.output}", (after,)

    def _after(self, executor: Executor, plan: Plan) -> Executor:
        row = executor.row
        if plan.verb is Verb.PLACE:
            if row is not None:
                return executor._replace(broken="a request was placed where it has a row already")
            return self._run(executor._replace(record=None), Row(plan.attempt, plan.output))
        if row is None:
            return executor._replace(broken="a plan names a row that is not there")
        if plan.verb is Verb.RUN:
            return self._run(executor, row)
        is_kept = plan.is_wanted and Safeguard.RECORDS in self._safeguards
        record = row._replace(is_end=plan.is_end) if is_kept else None
        return _answered(executor._replace(row=None, record=record), Result(is_gone=True))

    def _run(self, executor: Executor, row: Row) -> Executor:
        if len(row.output) == LENGTH:
            return _answered(executor._replace(row=row), Result())
        token = 0 if self._is_reproducible else 2 * executor.incarnation + executor.place
        grown = row._replace(output=(*row.output, token))
        return _answered(executor._replace(row=grown), Result(row.output, token))


def befall(executor: Executor, faults: Faults) -> Iterator[Move]:
    """Die, or lose the stream."""
    if faults.crashes:
        left = faults._replace(crashes=faults.crashes - 1, is_excused=True)
        died = Executor(
            executor.place, executor.incarnation + 1, executor.driver, is_cut=True, results=executor.results
        )
        yield f"{named(executor)} dies and comes back", (died, left)
    if faults.plan_cuts and not executor.is_cut and executor.driver[0] >= 0:
        left = faults._replace(plan_cuts=faults.plan_cuts - 1)
        yield f"the plan stream to {named(executor)} breaks", (executor._replace(is_cut=True), left)


def named(executor: Executor) -> str:
    """The executor in words."""
    return f"executor {executor.place + 1}"


def _answered(executor: Executor, result: Result) -> Executor:
    return executor if executor.is_cut else executor._replace(results=(*executor.results, result))
