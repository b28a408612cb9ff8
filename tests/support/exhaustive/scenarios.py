"""What is walked: each world from several beginnings, with so many faults that all orders can be tried.

For every safeguard there is a scenario that goes wrong without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from exhaustive.attach import attach_run
from exhaustive.clockwork import Budget
from exhaustive.gen import Gen
from exhaustive.resume import resume_run
from exhaustive.resume_parts import World


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` is to be run once for each answer of a generator. `num_runs` is what it had once."""

    name: str
    run: Callable[[Gen], None]
    num_runs: int

    def walk(self) -> int:
        """Try everything and return how many runs that took; raises what goes wrong, with its story."""
        gen, num_runs = Gen(), 0
        for _ in gen.runs():
            self.run(gen)
            num_runs += 1
        return num_runs


def _named(what: str, budget: Budget) -> str:
    return f"{what}: {', '.join(f'{number} {kind}' for kind, number in budget.items())}"


def _attach(num_runs: int, *, is_settled: bool = True, **budget: int) -> Scenario:
    name = _named("attach" if is_settled else "attach, boot", budget)
    return Scenario(name, partial(attach_run, budget=budget, is_settled=is_settled), num_runs)


def _resume(num_runs: int, world: World, *, window_s: float = 0.5, **budget: int) -> Scenario:
    name = _named(f"resume, {_NAMES[world]}", budget) + f" within {window_s:g} s"
    return Scenario(name, partial(resume_run, budget=budget, world=world, window_s=window_s), num_runs)


_ALIKE, _WITHOUT_TOKENS, _DIFFERING = World(), World(has_prior=False), World(is_reproducible=False)
_TWO, _AFTERMATH = World(num_schedulers=2, is_reproducible=False), World(is_reproducible=False, is_aftermath=True)
_NAMES = {
    _ALIKE: "executors that compute alike",
    _WITHOUT_TOKENS: "a client without its tokens",
    _DIFFERING: "tokens differ",
    _TWO: "two schedulers",
    _AFTERMATH: "two rows left",
}

_CRASH, _BOOT_CRASH = _attach(9, crash=1), _attach(105, is_settled=False, crash=1)
_LATE, _CRASH_LATE = _attach(25, is_settled=False, late=1), _attach(213, crash=1, late=1)
_CRASH_CUT = _attach(1423, crash=1, cut=1)
_CUT, _CUT_LATE = _resume(15, _ALIKE, cut=1), _resume(75, _ALIKE, window_s=0.02, cut=1, late=1)
_LEFT_CRASH, _LEFT_LOSS = _resume(436, _AFTERMATH, crash=1), _resume(436, _AFTERMATH, loss=1)
_PLAN_CUT, _MOVE = _resume(40, _DIFFERING, plan_cut=1), _resume(40, _WITHOUT_TOKENS, move=1)
_PRIORLESS = _resume(85, _WITHOUT_TOKENS, crash=1)
_PRIORLESS_CUT = _resume(1500, _WITHOUT_TOKENS, crash=1, cut=1)
_MOVE_CUT = _resume(1988, _WITHOUT_TOKENS, move=1, plan_cut=1)

SHORT: tuple[Scenario, ...] = (_CRASH, _LATE, _CUT)
"""The smallest, tried with every commit."""
SLOW: tuple[Scenario, ...] = (
    *(_BOOT_CRASH, _CRASH_LATE, _CRASH_CUT, _attach(517, takeover=1, cut=1)),
    *(_attach(105, takeover=1, late=1), _attach(141, cut=1, late=1), _attach(565, cut=2), _attach(1005, crash=2)),
    *(_PRIORLESS, _PLAN_CUT, _MOVE, _CUT_LATE, _LEFT_CRASH, _LEFT_LOSS, _MOVE_CUT),
    *(_resume(85, _DIFFERING, loss=1), _resume(85, _DIFFERING, crash=1), _resume(15, _ALIKE, cancel=1)),
    *(_resume(725, _ALIKE, cut=1, late=1), _resume(1028, _TWO, displace=1, cut=1)),
)
SOAK: tuple[Scenario, ...] = (
    _PRIORLESS_CUT,
    _resume(1637, _ALIKE, crash=1, cancel=1),
    *(_resume(4129, _WITHOUT_TOKENS, crash=1, move=1), _resume(1622, _DIFFERING, plan_cut=1, late=1)),
    *(_resume(3759, _DIFFERING, crash=1, late=1), _attach(1000, is_settled=False, crash=1, cut=1)),
    _resume(1000, _TWO, crash=1, displace=1),
)

REVEALING: dict[str, Scenario] = {
    "term": _BOOT_CRASH,
    "line": _CRASH,
    "busy": _CRASH,
    "lease": _CRASH_LATE,
    "yielding": _BOOT_CRASH,
    "one-claim": _CRASH_CUT,
    "offset": _PRIORLESS,
    "rolling-hash": _LEFT_CRASH,
    "attachment": _CUT_LATE,
    "stale-end": _CUT_LATE,
    "sync-gate": _PRIORLESS,
    "adoption": _PRIORLESS,
    "records": _PRIORLESS_CUT,
    "attempt": _LEFT_LOSS,
    "fitting": _LEFT_LOSS,
    "disowning": _LEFT_LOSS,
    "leaving": _MOVE,
    "finish": _MOVE_CUT,
    "stale-results": _PLAN_CUT,
}
"""By the safeguard without which it goes wrong."""
