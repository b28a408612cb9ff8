"""What happens to requests when executors come and go, and when clients come back.

The scheduler is the only one that decides which requests run; executors are the truth about what they have generated,
clients about what they have received. Whatever was lost, these three are brought together again here: `attach` and
`lose` for an executor, `join` and `restart` for a client.
"""

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinishReason
from paceline_scheduler.core.executor.reconcile import rebuild
from paceline_scheduler.core.executor.state import ExecutorState, UnansweredStep
from paceline_scheduler.core.executors import ExecutorDescription, SeenRow, Snapshot
from paceline_scheduler.core.live import MAX_LONE_FAILURES, LiveRequest
from paceline_scheduler.core.outputs import Failure, Outputs, Resumed
from paceline_scheduler.core.request import Request, Resumption
from paceline_scheduler.core.requests.adoption import adopted, has_ended_elsewhere, is_adoptable, outranks
from paceline_scheduler.core.requests.register import heard_by
from paceline_scheduler.core.requests.resuming import end_of_prior, prior_of
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.telling import told
from paceline_scheduler.errors import QuarantinedError, StepFailedError


def attach(state: CoreState, description: ExecutorDescription, snapshot: Snapshot, now: float) -> Outputs:
    """Take over an executor as its snapshot shows it; requests it lost wait again. Returns what clients did not hear.

    What was found there and is not known is another scheduler's that is gone, and is carried on; but not on an executor
    that this scheduler has driven before: there it is what was let go.
    """
    address = description.address
    before = state.executors.by_address.get(address)
    is_new = before is None or before.description.incarnation != description.incarnation
    accused = _in_step(before) if is_new else []
    culprit = _suspect_all(before, description)
    wanted = state.take_off_rows(address)
    for seen in snapshot.rows:
        if seen.record_id not in wanted:
            live = _claim(state, seen, description.model, is_new, now)
            if live is not None:
                wanted[seen.record_id] = live
    executor, recovered = rebuild(description, snapshot, wanted)
    if before is not None:
        executor.carry_on(before)
        if not is_new:
            _forgive(before)
    executor.pending_forgets.extend(
        seen.record_id
        for seen in snapshot.rows
        if seen.is_open_record and state.register.by_key(seen.record_id) is None
    )
    state.executors.by_address[address] = executor
    state.executors.has_word(address)
    for live in wanted.values():
        if live.final is not None:
            state.register.close(live)
        if live.row is None:
            state.wait_again(live, now)
    failures = _accuse_all(state, accused, now)
    if culprit is not None:
        executor.is_doubted = True
        failures += _try_again(state, culprit, description, now)
    return Outputs(tuple(outputs for _, outputs in recovered), failures)


def lose(state: CoreState, address: str, now: float) -> tuple[Failure, ...]:
    """An executor is gone: its requests wait for another placement, but for one that it must have died of."""
    state.executors.has_word(address)
    executor = state.executors.by_address.get(address)
    if executor is None:
        return ()
    accused, unanswered = _in_step(executor), executor.unanswered_steps()
    for live in state.take_off_rows(address).values():
        state.wait_again(live, now)
    failures = _accuse_all(state, accused, now)
    lost = ExecutorState(executor.description)
    lost.attached = False
    lost.carry_on(executor)
    lost.unanswered = unanswered
    lost.accused = tuple(accused) or executor.accused
    state.executors.by_address[address] = lost
    return failures


def join(state: CoreState, live: LiveRequest, resumption: Resumption) -> Resumed:
    """Let a client that has come back hear of a request, from what it does not have."""
    request, offset = resumption.request, resumption.progress.resume_from
    output = state.output_of(live)
    # What is left of the request may be an older attempt than the client has seen: what follows must not look older.
    live.attempt = max(live.attempt, resumption.progress.last_attempt)
    if live.final is None:
        state.register.listen(live, request)
        if live.row is not None and live.address is not None:
            rows = state.executors.by_address[live.address].rows
            rows.handle[live.row], rows.attempt[live.row] = request.handle, live.attempt
    else:
        live.request = heard_by(live.request, request)
    reason = FinishReason.NONE if live.final is None else live.final.reason
    rest = output[offset:]
    if not len(rest) and reason is FinishReason.NONE:
        return Resumed(output[:offset], None)
    logprobs = () if live.logprobs is None else live.logprobs.between(offset, len(output)) or ()
    output_hash = rolling_hash(resumption.progress.resume_hash, rest)
    return Resumed(output[:offset], told(live, offset, rest, output_hash, reason, logprobs))


def restart(state: CoreState, live: LiveRequest, resumption: Resumption, now: float) -> Resumed:
    """Let a request go on from what its client holds: what it has generated here is something else."""
    ended = ended_by_prior(state, resumption)
    if ended is not None:
        state.give_up(live, now)
        return ended
    if live.row is None:
        state.executors.forget_records(live.request.key)  # they hold the other output
    state.call_away(live)
    prior = prior_of(resumption.progress)
    live.go_on_from(prior)
    live.logprobs = live.prompt_logprobs = None
    live.attempt = max(live.attempt, resumption.progress.last_attempt)
    state.register.listen(live, resumption.request)
    state.waiting.add(live)
    return Resumed(prior, None)


def ended_by_prior(state: CoreState, resumption: Resumption) -> Resumed | None:
    """Return the end of a request whose client has all of its output but for the word that this is all."""
    request, prior = resumption.request, prior_of(resumption.progress)
    reason = end_of_prior(request, prior, _num_allowed(state, request))
    if reason is FinishReason.NONE:
        return None
    live = LiveRequest(request, 0, 0.0, attempt=resumption.progress.last_attempt)
    return Resumed(prior, told(live, len(prior), prior[:0], rolling_hash(HASH_START, prior), reason))


def _num_allowed(state: CoreState, request: Request) -> int:
    """Return how many output tokens a request may have at most."""
    serving = (e.description for e in state.executors if e.description.model == request.model)
    room = max((description.max_request_tokens for description in serving), default=0) - len(request.prompt_token_ids)
    return request.max_tokens or max(room, 1)


def _claim(state: CoreState, seen: SeenRow, model: str, is_new: bool, now: float) -> LiveRequest | None:
    """Return the request that should go on from a sighting, and take it from wherever it is; None: it should not."""
    live = state.register.by_key(seen.record_id)
    if live is not None and live.final is None:
        if not (is_new and is_adoptable(seen) and has_ended_elsewhere(seen, live)):
            return _switch(state, live, seen)
        state.give_up(live, now)
        state.make_way(live)
        live = None
    if live is not None and not live.was_heard and seen.attempt > live.attempt and is_adoptable(seen):
        state.make_way(live)  # what ended is an older attempt
        live = None
    kept = state.register.kept(seen.record_id)
    if live is not None or not is_new or not is_adoptable(seen) or (kept and kept.attempt >= seen.attempt):
        return None
    state.register.drop_kept(seen.record_id)
    state.num_arrivals += 1
    live = adopted(seen, model, state.register.new_handle(), state.num_arrivals, now)
    if live.final is not None:
        state.register.keep(live, now)
        return None
    state.register.add(live)
    state.register.detach(live, now)
    return live


def _switch(state: CoreState, live: LiveRequest, seen: SeenRow) -> LiveRequest | None:
    """Take a request from where it is if this sighting of it counts for more."""
    here = state.output_of(live)
    if not outranks(seen, live, here):
        return None
    state.call_away(live)
    live.attempt = seen.attempt
    if live.detached_until_s is not None:  # nobody has been told anything yet
        live.go_on_from(seen.output_token_ids)
    return live


def _in_step(executor: ExecutorState | None) -> list[LiveRequest]:
    """Return the requests that an executor was computing when it was last heard of."""
    if executor is None:
        return []
    found = (executor.rows.live[row] for row in executor.rows_in_step())
    return [live for live in found if live is not None and not live.is_stranger]


def _suspect_all(before: ExecutorState | None, description: ExecutorDescription) -> LiveRequest | None:
    """Suspect the requests of a step that failed, by what the executor tells; returns the one that was in it alone."""
    step = None if before is None else _failed_step(before, description)
    if step is None:
        return None
    suspects = []
    for live, position in step.positions:
        if live.row is None or live.address == description.address:  # else it runs elsewhere, since this was lost
            live.failed_until = position
            suspects.append(live)
    return suspects[0] if suspects and step.is_lone else None


def _try_again(
    state: CoreState, culprit: LiveRequest, description: ExecutorDescription, now: float
) -> tuple[Failure, ...]:
    """Count a step of its own that failed against a request: it is tried once more, elsewhere if that is possible."""
    if not state.register.is_open(culprit) or description.failed_step is None:
        return ()
    culprit.num_lone_failures += 1
    if culprit.num_lone_failures >= MAX_LONE_FAILURES:
        state.give_up(culprit, now)
        return (Failure(culprit.request.handle, StepFailedError(description.failed_step.message)),)
    culprit.failed_at = description.address
    others = (other for other in state.executors.serving(description.model) if other.description is not description)
    if culprit.row is not None and any(culprit.fits(other.description) for other in others):
        state.call_away(culprit)
        state.waiting.add(culprit)
    return ()


def _failed_step(before: ExecutorState, description: ExecutorDescription) -> UnansweredStep | None:
    """Return what the step that failed was to do, if it was planned here and has not been judged yet."""
    failed, planned = description.failed_step, before.description
    if failed is None or (planned.incarnation, planned.epoch) != (description.incarnation, failed.epoch):
        return None
    return next((step for step in before.unanswered_steps() if step.step_id == failed.step_id), None)


def _accuse_all(state: CoreState, accused: list[LiveRequest], now: float) -> tuple[Failure, ...]:
    """Count an executor's death against requests that are off its rows; returns the failure of one it must be due to.

    A suspect runs in steps of its own: where there was another one in the step, it was not a suspect then.
    """
    is_lone = len(accused) == 1 and accused[0].is_deadly(len(accused[0].output_token_ids))
    culprit = accused[0] if is_lone else None
    for live in accused:
        _accuse(live)
    if culprit is None or not state.register.is_open(culprit):
        return ()
    state.give_up(culprit, now)
    return (Failure(culprit.request.handle, QuarantinedError(_quarantine_sentence(culprit))),)


def _accuse(live: LiveRequest) -> None:
    """Count a death against a request, unless it has got on since the one before."""
    num_output = len(live.output_token_ids)
    has_got_on = live.last_death_offset is None or num_output > live.last_death_offset
    live.num_executor_deaths = 1 if has_got_on else live.num_executor_deaths + 1
    live.last_death_offset = num_output


def _forgive(executor: ExecutorState) -> None:
    """It was not dead."""
    for live in executor.accused:
        live.num_executor_deaths = max(0, live.num_executor_deaths - 1)


def _quarantine_sentence(live: LiveRequest) -> str:
    return (
        f"{live.num_executor_deaths} executors died while they ran it, the last one while it ran nothing else; it is "
        "not tried again"
    )
