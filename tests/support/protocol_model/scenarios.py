"""What is checked: each model from several beginnings, with the faults that all states can be visited for.

The short ones are checked with every commit. For every safeguard there is one that shows what happens without it.
"""

from dataclasses import dataclass

from protocol_model import attach, bounds, resume
from protocol_model.attach import Start, attach_model
from protocol_model.attach_state import Faults as AttachFaults
from protocol_model.attach_state import Safeguard as AttachSafeguard
from protocol_model.bounds import Safeguard as BoundsSafeguard
from protocol_model.bounds import bounds_model
from protocol_model.checker import Model
from protocol_model.resume import World, resume_model
from protocol_model.resume_state import Faults as ResumeFaults
from protocol_model.resume_state import Safeguard as ResumeSafeguard

Safeguard = AttachSafeguard | ResumeSafeguard | BoundsSafeguard


@dataclass(frozen=True, slots=True)
class AttachScenario:
    """A beginning and what may happen; `num_plans` are sent on a stream at most. `num_states` is what it had once."""

    name: str
    start: Start
    faults: AttachFaults
    num_plans: int
    num_states: int

    def model(self, without: Safeguard | None = None) -> Model:
        """Return the model, without one of its safeguards."""
        safeguards = attach.ALL_SAFEGUARDS - {without}
        return attach_model(self.start, self.faults, self.num_plans, safeguards)


@dataclass(frozen=True, slots=True)
class ResumeScenario:
    """A world and what may happen in it. `num_states` is what it had once."""

    name: str
    world: World
    faults: ResumeFaults
    num_states: int

    def model(self, without: Safeguard | None = None) -> Model:
        """Return the model, without one of its safeguards."""
        return resume_model(self.world, self.faults, resume.ALL_SAFEGUARDS - {without})


@dataclass(frozen=True, slots=True)
class BoundsScenario:
    """A row of so many positions, its drafts in a step and how often its stream breaks at most."""

    name: str
    limit: int
    max_drafts: int
    num_cuts: int
    num_states: int

    def model(self, without: Safeguard | None = None) -> Model:
        """Return the model, without one of its safeguards."""
        return bounds_model(self.limit, self.max_drafts, self.num_cuts, bounds.ALL_SAFEGUARDS - {without})


Scenario = AttachScenario | ResumeScenario | BoundsScenario

_DIFFERING = World(is_reproducible=False)
_WITHOUT_TOKENS = World(has_prior=False)
_AFTERMATH = World(is_reproducible=False, start=resume.Start.AFTERMATH)
_TWO = World(num_schedulers=2, is_reproducible=False)

_BOOT = AttachScenario(
    "attach: both boot, one comes back too soon", Start.BOOTING, AttachFaults(crashes=0, cuts=0, haste=1), 1, 8_464
)
_BOOT_CRASH = AttachScenario("attach: both boot, a crash", Start.BOOTING, AttachFaults(crashes=1, cuts=0), 0, 38_578)
_TWO_CRASHES = AttachScenario("attach: two crashes", Start.SETTLED, AttachFaults(crashes=2, cuts=0), 1, 61_588)
_CRASH_AND_CUT = AttachScenario(
    "attach: a crash, a stream cut", Start.SETTLED, AttachFaults(crashes=1, cuts=1), 1, 31_677
)
_TAKEOVER = AttachScenario(
    "attach: a takeover, a stream cut, late messages",
    Start.SETTLED,
    AttachFaults(crashes=0, cuts=1, displacements=1, lingering=1),
    1,
    11_001,
)
_STRAYS = AttachScenario(
    "attach: a takeover, late messages, a plan lost or doubled",
    Start.SETTLED,
    AttachFaults(crashes=0, cuts=0, displacements=1, strays=1, lingering=1),
    2,
    9_417,
)
_LATE_AFTER_CRASH = AttachScenario(
    "attach: a crash, a stream cut, late messages",
    Start.SETTLED,
    AttachFaults(crashes=1, cuts=1, lingering=1),
    1,
    123_700,
)

_CRASHES = ResumeScenario("resume: two crashes, tokens differ", _DIFFERING, ResumeFaults(crashes=2), 21_070)
_AFTER = ResumeScenario("resume: two rows left, two crashes", _AFTERMATH, ResumeFaults(crashes=2), 128_640)
_AFTER_LOSS = ResumeScenario(
    "resume: two rows left, an executor lost that lives", _AFTERMATH, ResumeFaults(crashes=0, losses=1), 15_473
)
_PRIORLESS = ResumeScenario(
    "resume: a client without its tokens, a crash, a stream cut",
    _WITHOUT_TOKENS,
    ResumeFaults(crashes=1, client_cuts=1),
    15_866,
)
_PREEMPTION = ResumeScenario(
    "resume: a client without its tokens, a crash, a preemption",
    _WITHOUT_TOKENS,
    ResumeFaults(crashes=1, preemptions=1),
    10_065,
)
_CUTS = ResumeScenario("resume: two streams cut", World(), ResumeFaults(crashes=0, client_cuts=2), 4_546)
_PLAN_CUT = ResumeScenario(
    "resume: a crash, a plan stream cut", _DIFFERING, ResumeFaults(crashes=1, plan_cuts=1), 11_959
)
_CANCEL = ResumeScenario(
    "resume: a crash, a preemption, a cancel", World(), ResumeFaults(crashes=1, preemptions=1, cancels=1), 75_286
)
_DISPLACED = ResumeScenario(
    "resume: two schedulers, a displacement, a stream cut",
    _TWO,
    ResumeFaults(crashes=0, displacements=1, client_cuts=1),
    27_994,
)
_LOSS = ResumeScenario(
    "resume: a crash, an executor lost that lives", _DIFFERING, ResumeFaults(crashes=1, losses=1), 98_063
)

_DRAFTS = BoundsScenario("bounds: seven positions, three drafts, two streams cut", 7, 3, 2, 17_187)

SHORT: tuple[Scenario, ...] = (
    _DRAFTS,
    *(_BOOT, _BOOT_CRASH, _TWO_CRASHES, _CRASH_AND_CUT, _TAKEOVER, _STRAYS),
    *(_CRASHES, _AFTER, _AFTER_LOSS, _PRIORLESS, _PREEMPTION, _CUTS, _PLAN_CUT, _DISPLACED),
)
LONG: tuple[Scenario, ...] = (
    _LATE_AFTER_CRASH,
    AttachScenario(
        "attach: two crashes, late messages", Start.SETTLED, AttachFaults(crashes=2, cuts=0, lingering=1), 1, 243_311
    ),
    AttachScenario(
        "attach: a crash, a takeover, late messages, one comes back too soon",
        Start.SETTLED,
        AttachFaults(crashes=1, cuts=0, displacements=1, lingering=1, haste=1),
        1,
        232_706,
    ),
    AttachScenario(
        "attach: two streams cut, a takeover, late messages",
        Start.SETTLED,
        AttachFaults(crashes=0, cuts=2, displacements=1, lingering=1),
        1,
        226_204,
    ),
    AttachScenario(
        "attach: a crash, late messages, a plan lost or doubled",
        Start.SETTLED,
        AttachFaults(crashes=1, cuts=0, strays=1, lingering=1),
        2,
        109_912,
    ),
    *(_CANCEL, _LOSS),
    ResumeScenario(
        "resume: two rows left, a crash, an executor lost that lives",
        _AFTERMATH,
        ResumeFaults(crashes=1, losses=1),
        207_196,
    ),
    ResumeScenario(
        "resume: two rows left, a crash, a stream cut", _AFTERMATH, ResumeFaults(crashes=1, client_cuts=1), 115_944
    ),
    ResumeScenario("resume: two rows left, a crash, a cancel", _AFTERMATH, ResumeFaults(crashes=1, cancels=1), 129_218),
    ResumeScenario(
        "resume: a crash, a stream cut, a client that is late",
        World(),
        ResumeFaults(crashes=1, client_cuts=1, windows=1),
        125_148,
    ),
    ResumeScenario(
        "resume: two schedulers, a crash, a displacement", _TWO, ResumeFaults(crashes=1, displacements=1), 117_412
    ),
)

REVEALING: dict[Safeguard, Scenario] = {
    AttachSafeguard.EPOCH_EQUALITY: _TAKEOVER,
    AttachSafeguard.INCARNATION_EQUALITY: _LATE_AFTER_CRASH,
    AttachSafeguard.STEP_ORDER: _STRAYS,
    AttachSafeguard.TERM_ORDER: _BOOT_CRASH,
    AttachSafeguard.DROPPED_QUEUE: _TAKEOVER,
    AttachSafeguard.STEP_BOUNDARY: _TAKEOVER,
    AttachSafeguard.LINE: _TWO_CRASHES,
    AttachSafeguard.LEASE: _LATE_AFTER_CRASH,
    AttachSafeguard.STANDING_DOWN: _CRASH_AND_CUT,
    AttachSafeguard.ONE_CLAIM: _CRASH_AND_CUT,
    ResumeSafeguard.OFFSET: _CUTS,
    ResumeSafeguard.HASH: _AFTER,
    ResumeSafeguard.ATTACHMENT: _CUTS,
    ResumeSafeguard.STALE_END: _CUTS,
    ResumeSafeguard.SYNC_GATE: _PRIORLESS,
    ResumeSafeguard.ADOPTION: _PRIORLESS,
    ResumeSafeguard.RECORDS: _PRIORLESS,
    ResumeSafeguard.ATTEMPT: _AFTER_LOSS,
    ResumeSafeguard.FITTING: _AFTER_LOSS,
    ResumeSafeguard.DISOWNING: _LOSS,
    ResumeSafeguard.LEAVING: _PREEMPTION,
    ResumeSafeguard.FINISH: _PREEMPTION,
    ResumeSafeguard.STALE_RESULTS: _LOSS,
    **dict.fromkeys(BoundsSafeguard, _DRAFTS),
}
