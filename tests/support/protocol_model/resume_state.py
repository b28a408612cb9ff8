"""What the resume model consists of: one client with one request of a few tokens, schedulers, two executors.

Knows no moves. A token is a number that says who computed it: 0 wherever all executors compute the same. What stands
for a rolling hash is the output itself.
"""

from enum import Enum, IntEnum
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LENGTH = 3
"""How many output tokens the request has."""

MAX_PLANS = 2
"""How many plans of an executor may be unanswered: one runs ahead of the other."""

Output = tuple[int, ...]


class Safeguard(Enum):
    """What can be switched off, to see that the checker notices."""

    OFFSET = "a client is served from the offset it asks for"
    HASH = "a client is served only from output that begins with what it holds"
    ATTACHMENT = "a lower attachment than the current one is refused"
    STALE_END = "the end of a stream that the request has left has no effect"
    SYNC_GATE = "clients are answered when it is known what all executors run"
    ADOPTION = "a scheduler carries on what it finds"
    RECORDS = "executors keep what is released until nobody needs it"
    ATTEMPT = "of two rows of a request the higher attempt lives"
    FITTING = "a client's request goes on only in a row that holds what the client was told"
    DISOWNING = "what is let go is nobody's end"
    LEAVING = "a request is placed again when its release is confirmed"
    FINISH = "an end on the device beats the preemption that came after it"
    STALE_RESULTS = "results of a stream that was given up are not applied"


class Phase(IntEnum):
    """What the client wants, or has got."""

    WANTS = 0
    CANCELLING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4


class Ending(IntEnum):
    """How the scheduler ended a client's stream."""

    NONE = 0
    DONE = 1
    CANCELLED = 2
    ABORTED = 3  # a newer attachment has the request
    REFUSED = 4  # nobody has what the client does not have, nor the tokens before
    UNAVAILABLE = 5  # not here; somewhere else, or later


class Delta(NamedTuple):
    """One token told to the client, with the output it was computed from."""

    base: Output
    token: int
    attempt: int


class Opening(NamedTuple):
    """The request as a client sends it, again or for the first time."""

    attachment: int
    held: Output  # its length is the offset; it stands for the hash, and for the tokens where they are sent
    last_attempt: int


class Stream(NamedTuple):
    """A client's stream for the request."""

    attachment: int
    opening: Opening | None  # on its way, or waiting for the gate
    deltas: tuple[Delta, ...] = ()  # on their way
    ending: Ending = Ending.NONE
    is_open: bool = True  # at the client's end
    is_cut: bool = False


class Client(NamedTuple):
    """The client library, which does all it can to get its request done."""

    held: Output = ()
    attachment: int = 0
    last_attempt: int = 0
    phase: Phase = Phase.WANTS
    slot: int = -1  # of the scheduler that its stream goes to, -1 without one
    broken: str = ""


class RowView(IntEnum):
    """What a scheduler thinks of the row for the request on an executor."""

    EMPTY = 0
    RUNNING = 1
    PREEMPTED = 2  # its release is on its way; the request waits for that
    ENDING = 3  # to be released with its end
    DISOWNED = 4  # to be released because the request goes on elsewhere, or from other output
    LEAVING = 5  # that release is on its way


class Word(IntEnum):
    """What a scheduler has heard of an executor."""

    NONE = 0
    ATTACHED = 1
    LOST = 2


class Live(NamedTuple):
    """The request as a scheduler knows it."""

    output: Output
    attempt: int
    attachment: int = 0
    is_heard: bool = False
    is_over: bool = False
    is_cancelled: bool = False


class Scheduler(NamedTuple):
    """A scheduler process. Its `boot` changes with a crash, and when it gives up everything."""

    boot: int = 1
    words: tuple[Word, Word] = (Word.NONE, Word.NONE)
    driven: tuple[int, int] = (0, 0)  # the incarnation it drove last of each executor
    rows: tuple[RowView, RowView] = (RowView.EMPTY, RowView.EMPTY)
    live: Live | None = None
    is_resting: bool = False  # it stands by
    broken: str = ""


class Verb(IntEnum):
    """What a plan does."""

    PLACE = 0
    RUN = 1
    RELEASE = 2


class Plan(NamedTuple):
    """A step. A placement computes a token as well; a release says whether it is the end, and wanted by a client."""

    verb: Verb
    attempt: int = 0
    output: Output = ()
    is_wanted: bool = True
    is_end: bool = False


class Result(NamedTuple):
    """What came of a plan: a token and the output before it, or the row's departure."""

    base: Output = ()
    token: int = -1  # -1: none
    is_gone: bool = False


class Row(NamedTuple):
    """The request on an executor, or its record."""

    attempt: int
    output: Output
    is_end: bool = False  # it was released with its end


class Executor(NamedTuple):
    """An executor process and the plan stream to it."""

    place: int  # 0 or 1
    incarnation: int = 1
    driver: tuple[int, int] = (-1, 0)  # slot and boot
    is_cut: bool = False
    row: Row | None = None
    record: Row | None = None
    plans: tuple[Plan, ...] = ()  # on their way
    results: tuple[Result, ...] = ()  # on their way
    broken: str = ""


class Faults(NamedTuple):
    """How many more of each kind may happen."""

    crashes: int = 2  # of schedulers and executors
    client_cuts: int = 0  # of the client's streams
    plan_cuts: int = 0  # of plan streams
    losses: int = 0  # executors that a scheduler gives up though they live
    displacements: int = 0  # of a scheduler that lives
    preemptions: int = 0
    cancels: int = 0  # by the client
    windows: int = 0  # that end although the client is on its way
    is_excused: bool = False  # something was lost that a client without its tokens cannot do without


def with_item(pair: tuple[T, T], index: int, value: T) -> tuple[T, T]:
    """A pair with one item changed."""
    return (pair[0], value) if index else (value, pair[1])
