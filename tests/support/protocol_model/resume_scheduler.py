"""What schedulers do with executors in the resume model: attach and adopt, place, apply results.

Follows `scheduler/paceline_scheduler/core`: `recovery`, `requests/adoption`, `executor`.
"""

from collections.abc import Iterator

from protocol_model.checker import Move
from protocol_model.resume_client import Talk, with_stream
from protocol_model.resume_executor import named
from protocol_model.resume_state import (
    LENGTH,
    MAX_PLANS,
    Delta,
    Ending,
    Executor,
    Faults,
    Live,
    Plan,
    Result,
    Row,
    RowView,
    Safeguard,
    Scheduler,
    Verb,
    Word,
    with_item,
)

_ON_A_ROW = (RowView.RUNNING, RowView.PREEMPTED)


class SchedulerMoves:
    """The moves of one scheduler towards executors, given which safeguards are on."""

    def __init__(self, slot: int, safeguards: frozenset[Safeguard]) -> None:
        self._slot = slot
        self._name = f"scheduler {'AB'[slot]}"
        self._safeguards = safeguards

    # Executors

    def attach(self, talk: Talk, scheduler: Scheduler, executor: Executor) -> Iterator[Move]:
        """Attach where it drove, or where nobody did, for the first time or again."""
        driver, index = (self._slot, scheduler.boot), executor.place
        is_known = scheduler.words[index] is Word.ATTACHED
        is_free = executor.driver[0] in (-1, self._slot)
        if is_free and (not is_known or executor.is_cut or executor.driver != driver) and not scheduler.is_resting:
            yield self._attached(talk, scheduler, executor)

    def attach_after(self, talk: Talk, scheduler: Scheduler, executor: Executor, other: Scheduler) -> Iterator[Move]:
        """Attach where another scheduler drove that is gone, or is silent."""
        slot, boot = executor.driver
        is_silent = executor.is_cut or boot != other.boot
        if slot == 1 - self._slot and is_silent and not scheduler.is_resting:
            for_now = self._attached(talk, scheduler, executor)
            yield for_now[0], (*for_now[1], other)

    def displace(self, talk: Talk, scheduler: Scheduler, executor: Executor, faults: Faults) -> Iterator[Move]:
        """Attach though another scheduler that lives drives the executor."""
        if faults.displacements and executor.driver[0] == 1 - self._slot:
            label, parts = self._attached(talk, scheduler._replace(is_resting=False), executor)
            yield f"{label} and displaces the other", (*parts, faults._replace(displacements=faults.displacements - 1))

    def yield_up(self, talk: Talk, scheduler: Scheduler, executor: Executor, other: Scheduler) -> Iterator[Move]:
        """Another scheduler drives an executor: give up all of them, and all clients."""
        is_driven = executor.driver == (1 - self._slot, other.boot)
        if is_driven and Word.ATTACHED in scheduler.words:
            new_life = Scheduler(scheduler.boot + 1, is_resting=True)
            yield f"{self._name} gives up all", (hung_up(talk), new_life, executor, other)

    def rest(self, scheduler: Scheduler) -> Iterator[Move]:
        """It has waited long enough, and attaches where nobody drives."""
        if scheduler.is_resting:
            yield f"{self._name} looks for executors again", (scheduler._replace(is_resting=False),)

    def _attached(self, talk: Talk, scheduler: Scheduler, executor: Executor) -> Move:
        driver = (self._slot, scheduler.boot)
        attached = executor._replace(driver=driver, is_cut=False, plans=(), results=())
        found, told = self._take_over(talk, scheduler, attached)
        return f"{self._name} attaches to {named(executor)}", (told, found, attached)

    def plan(self, scheduler: Scheduler, executor: Executor) -> Iterator[Move]:
        """Send a plan: a placement, a step, or a release."""
        index, live = executor.place, scheduler.live
        if not self._may_plan(scheduler, executor):
            return
        view = scheduler.rows[index]
        if view in (RowView.ENDING, RowView.DISOWNED):
            is_wanted = view is RowView.ENDING or Safeguard.DISOWNING not in self._safeguards
            release = Plan(Verb.RELEASE, is_wanted=is_wanted, is_end=True)
            yield (
                f"{self._name} releases the row on {named(executor)}",
                _sent(scheduler, executor, release, RowView.LEAVING),
            )
        if live is None or live.is_over:
            return
        if view is RowView.RUNNING and len(live.output) + _num_unanswered(executor) < LENGTH:
            yield f"{self._name} plans a step on {named(executor)}", _sent(scheduler, executor, Plan(Verb.RUN), view)
        if view is RowView.EMPTY and self._waits(scheduler) and is_synced(scheduler, self._safeguards):
            placed = scheduler._replace(live=live._replace(attempt=live.attempt + 1))
            place = Plan(Verb.PLACE, live.attempt + 1, live.output)
            label = f"{self._name} places attempt {place.attempt} with {live.output} on {named(executor)}"
            yield label, _sent(placed, executor, place, RowView.RUNNING)

    def preempt(self, scheduler: Scheduler, executor: Executor, faults: Faults) -> Iterator[Move]:
        """Take the request off its row, to continue later."""
        is_running = scheduler.rows[executor.place] is RowView.RUNNING
        if faults.preemptions and is_running and self._may_plan(scheduler, executor):
            release = Plan(Verb.RELEASE)
            sent = _sent(scheduler, executor, release, RowView.PREEMPTED)
            left = faults._replace(preemptions=faults.preemptions - 1)
            yield f"{self._name} preempts the request on {named(executor)}", (*sent, left)

    def apply(self, talk: Talk, scheduler: Scheduler, executor: Executor) -> Iterator[Move]:
        """Take a result; what it brings is told to the client."""
        index = executor.place
        is_driven = scheduler.words[index] is Word.ATTACHED or Safeguard.STALE_RESULTS not in self._safeguards
        if not executor.results or executor.driver != (self._slot, scheduler.boot) or not is_driven:
            return
        result, rest = executor.results[0], executor._replace(results=executor.results[1:])
        if result.is_gone:
            left = scheduler._replace(rows=with_view(scheduler, index, RowView.EMPTY))
            yield f"{self._name} learns that {named(executor)} let the row go", (talk, left, rest)
            return
        applied, told = self._applied(talk, scheduler, index, result)
        yield f"{self._name} gets a result of {named(executor)}", (told, applied, rest)

    def lose(self, scheduler: Scheduler, executor: Executor, faults: Faults) -> Iterator[Move]:
        """Give an executor up that lives but is not heard of: its stream is closed, its rows are not thought of."""
        index = executor.place
        if faults.losses and scheduler.words[index] is not Word.LOST and executor.driver[0] in (-1, self._slot):
            lost = scheduler._replace(
                words=with_item(scheduler.words, index, Word.LOST), rows=with_view(scheduler, index, RowView.EMPTY)
            )
            left = faults._replace(losses=faults.losses - 1, is_excused=True)
            yield f"{self._name} declares {named(executor)} lost", (lost, executor._replace(is_cut=True), left)

    def crash(self, talk: Talk, scheduler: Scheduler, faults: Faults) -> Iterator[Move]:
        """Die; what was told to clients may still arrive. A successor begins with nothing."""
        if faults.crashes:
            left = faults._replace(crashes=faults.crashes - 1)
            yield f"{self._name} dies and comes back", (hung_up(talk), Scheduler(scheduler.boot + 1), left)

    # Inside

    def _may_plan(self, scheduler: Scheduler, executor: Executor) -> bool:
        is_driven = executor.driver == (self._slot, scheduler.boot) and not executor.is_cut
        is_attached = scheduler.words[executor.place] is Word.ATTACHED
        return is_attached and is_driven and _num_unanswered(executor) < MAX_PLANS

    def _waits(self, scheduler: Scheduler) -> bool:
        on_a_row = _ON_A_ROW if Safeguard.LEAVING in self._safeguards else (RowView.RUNNING,)
        return not any(view in on_a_row for view in scheduler.rows)

    def _applied(self, talk: Talk, scheduler: Scheduler, index: int, result: Result) -> tuple[Scheduler, Talk]:
        live, view = scheduler.live, scheduler.rows[index]
        counts = view in _ON_A_ROW or Safeguard.STALE_RESULTS not in self._safeguards
        if live is None or live.is_over or result.token < 0 or not counts:
            return scheduler, talk
        if result.base != live.output:
            return scheduler._replace(broken=f"token {result} was added to {live.output}"), talk
        output = (*live.output, result.token)
        is_over = len(output) == LENGTH
        told = tell(talk, live, (Delta(live.output, result.token, live.attempt),), _done(is_over=is_over))
        rows = scheduler.rows
        if is_over and view is RowView.RUNNING:
            rows = with_view(scheduler, index, RowView.ENDING)
        return scheduler._replace(live=live._replace(output=output, is_over=is_over), rows=rows), told

    def _take_over(self, talk: Talk, scheduler: Scheduler, executor: Executor) -> tuple[Scheduler, Talk]:
        """Bring together what is known and what the snapshot of an executor shows."""
        index, was_here = executor.place, scheduler.rows[executor.place] in _ON_A_ROW
        is_new = scheduler.driven[index] != executor.incarnation
        empty = scheduler._replace(
            words=with_item(scheduler.words, index, Word.ATTACHED),
            driven=with_item(scheduler.driven, index, executor.incarnation),
            rows=with_view(scheduler, index, RowView.EMPTY),
        )
        seen = executor.row or executor.record
        if seen is None:
            return empty, talk
        claimed = empty if was_here else self._claimed(empty, seen, is_new=is_new)
        if claimed is None:
            rows = with_view(empty, index, RowView.DISOWNED if executor.row else RowView.EMPTY)
            return self._noting_wrong_choice(empty._replace(rows=rows), seen), talk
        live = claimed.live
        assert live is not None, "a request is claimed"
        if live.attempt != seen.attempt or live.is_over or not self._fits(live, seen):
            view = RowView.DISOWNED if executor.row else RowView.EMPTY
            return claimed._replace(rows=with_view(claimed, index, view)), talk
        is_over = len(seen.output) == LENGTH
        if executor.row is None and Safeguard.FINISH not in self._safeguards:
            is_over = False
        deltas = tuple(
            Delta(seen.output[:offset], seen.output[offset], live.attempt)
            for offset in range(len(live.output), len(seen.output))
        )
        view = RowView.EMPTY if executor.row is None else RowView.ENDING if is_over else RowView.RUNNING
        told = tell(talk, live, deltas, _done(is_over=is_over))
        after = claimed._replace(live=live._replace(output=seen.output, is_over=is_over or seen.is_end))
        return after._replace(rows=with_view(after, index, view)), told

    def _claimed(self, scheduler: Scheduler, seen: Row, *, is_new: bool) -> Scheduler | None:
        """The scheduler with the request where it should go on from this sighting; None: it should not."""
        live = scheduler.live
        if live is None or live.is_over:
            is_older = live is not None and live.attempt >= seen.attempt
            if not is_new or is_older or Safeguard.ADOPTION not in self._safeguards:
                return None
            return scheduler._replace(live=Live(seen.output, seen.attempt))
        has_ended = seen.is_end and not live.is_heard and seen.attempt >= live.attempt and is_new
        is_on_row = any(view in _ON_A_ROW for view in scheduler.rows)
        is_ahead = seen.attempt > live.attempt or (seen.attempt == live.attempt and not is_on_row)
        if Safeguard.ATTEMPT not in self._safeguards:
            is_ahead = True
        fits = not live.is_heard or self._fits(live, seen)
        if not has_ended and (seen.is_end or not is_ahead or not fits):
            return None
        broken = "a lower attempt took the place of a higher one" * (seen.attempt < live.attempt)
        output = live.output if live.is_heard else seen.output
        claimed = live._replace(attempt=seen.attempt, output=output)
        return called_away(scheduler)._replace(live=claimed, broken=broken or scheduler.broken)

    def _fits(self, live: Live, seen: Row) -> bool:
        return seen.output[: len(live.output)] == live.output or Safeguard.FITTING not in self._safeguards

    def _noting_wrong_choice(self, scheduler: Scheduler, seen: Row) -> Scheduler:
        live = scheduler.live
        if live is None or live.is_over or seen.is_end or seen.attempt <= live.attempt:
            return scheduler
        if live.is_heard and seen.output[: len(live.output)] != live.output:
            return scheduler
        return scheduler._replace(broken="a higher attempt gave way to a lower one")


def is_synced(scheduler: Scheduler, safeguards: frozenset[Safeguard]) -> bool:
    """Whether it has had word of every executor, or does not wait for that."""
    return Word.NONE not in scheduler.words or Safeguard.SYNC_GATE not in safeguards


def with_view(scheduler: Scheduler, index: int, view: RowView) -> tuple[RowView, RowView]:
    """The scheduler's rows with one changed."""
    return with_item(scheduler.rows, index, view)


def tell(talk: Talk, live: Live | None, deltas: tuple[Delta, ...], ending: Ending) -> Talk:
    """Send tokens to whoever listens."""
    for stream in talk:
        is_current = live is not None and live.is_heard and stream.attachment == live.attachment
        if (
            is_current
            and stream.ending is Ending.NONE
            and not stream.is_cut
            and stream.is_open
            and stream.opening is None
        ):
            return with_stream(talk, stream, stream._replace(deltas=(*stream.deltas, *deltas), ending=ending))
    return talk


def ended(scheduler: Scheduler, *, is_cancelled: bool) -> Scheduler:
    """The scheduler after the end of the request was decided here."""
    live = scheduler.live
    if live is None or live.is_over:
        return scheduler
    return called_away(scheduler)._replace(live=live._replace(is_over=True, is_cancelled=is_cancelled))


def hung_up(talk: Talk) -> Talk:
    """The streams after the scheduler's end of all of them has closed."""
    return tuple(
        stream._replace(opening=None, ending=stream.ending or Ending.UNAVAILABLE) for stream in talk if stream.is_open
    )


def called_away(scheduler: Scheduler) -> Scheduler:
    """The scheduler after it has taken the request from where it was."""
    views = tuple(
        RowView.DISOWNED if view is RowView.RUNNING else RowView.LEAVING if view is RowView.PREEMPTED else view
        for view in scheduler.rows
    )
    return scheduler._replace(rows=(views[0], views[1]))


def superseded(talk: Talk, live: Live) -> Talk:
    """The streams after another one took the place of the listener."""
    for stream in talk:
        if live.is_heard and stream.attachment == live.attachment and stream.ending is Ending.NONE:
            return with_stream(talk, stream, stream._replace(ending=Ending.ABORTED))
    return talk


def _sent(scheduler: Scheduler, executor: Executor, plan: Plan, view: RowView) -> tuple[Scheduler, Executor]:
    sent = executor._replace(plans=(*executor.plans, plan))
    return scheduler._replace(rows=with_view(scheduler, executor.place, view)), sent


def _num_unanswered(executor: Executor) -> int:
    return len(executor.plans) + len(executor.results)


def _done(*, is_over: bool) -> Ending:
    return Ending.DONE if is_over else Ending.NONE
