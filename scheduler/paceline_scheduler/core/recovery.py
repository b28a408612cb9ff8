"""What happens to requests when executors come and go, and when clients come back."""

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinishReason
from paceline_scheduler.core.ending import fail_unservable, refuse_late
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.executor.reconcile import rebuild
from paceline_scheduler.core.executors import ExecutorDescription, SeenRow, Snapshot
from paceline_scheduler.core.live import LiveRequest, queue_key_of
from paceline_scheduler.core.outputs import Failure, Resumed, TokenOutputs
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.request_outputs import outputs_of
from paceline_scheduler.core.requests.adoption import adopted, has_ended_elsewhere, is_adoptable, outranks
from paceline_scheduler.core.requests.request_table import with_listener_of
from paceline_scheduler.core.requests.resuming import end_of_prior, prior_of
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.suspects import blame_deaths, blame_failed_step
from paceline_scheduler.errors import QuarantinedError, StepFailedError


def attach(
    state: CoreState, description: ExecutorDescription, snapshot: Snapshot, now: float
) -> tuple[tuple[TokenOutputs, ...], tuple[Failure, ...]]:
    if state.first_attached_s is None:
        state.first_attached_s = now
    tokens, failures = _attach(state, description, snapshot, now)
    return tokens, (*failures, *fail_unservable(state, now), *refuse_late(state, now))


def _attach(
    state: CoreState, description: ExecutorDescription, snapshot: Snapshot, now: float
) -> tuple[tuple[TokenOutputs, ...], tuple[Failure, ...]]:
    """Adopts unknown requests of a former scheduler; on an executor that this scheduler has driven before they are
    leftovers.
    """
    address = description.address
    before = state.executors.by_address.get(address)
    is_new = before is None or before.description.incarnation != description.incarnation
    blamed = _in_step(before) if is_new else []
    culprit = None
    if before is not None:
        culprit = blame_failed_step(before.unanswered_steps(), before.description, description)
    wanted = state.take_off_rows(address)
    for seen in snapshot.rows:
        if seen.record_id not in wanted:
            live = _claim(state, seen, description.model, is_new, now)
            if live is not None:
                wanted[seen.record_id] = live
    executor, recovered = rebuild(description, snapshot, wanted, now)
    if before is not None:
        executor.inherit(before)
        if not is_new:
            before.suspects.clear_blame()
    executor.ledger.next_plan.forgets.extend(
        seen.record_id
        for seen in snapshot.rows
        if seen.is_open_record and state.requests.by_key(seen.record_id) is None
    )
    state.executors.attach(executor)
    for live in wanted.values():
        if live.final is not None:
            state.close(live)
        if live.held is None:
            state.wait_again(live, now)
    failures = _blame_all(state, blamed, now)
    if culprit is not None:
        executor.suspects.is_doubted = True
        failures += _try_again(state, culprit, description, now)
    return tuple(outputs for _, outputs in recovered), failures


def lose(state: CoreState, address: str, now: float) -> tuple[Failure, ...]:
    return *_lose(state, address, now), *refuse_late(state, now)


def remove(state: CoreState, address: str, now: float) -> tuple[Failure, ...]:
    failures = _lose(state, address, now)
    state.executors.remove(address)
    return *failures, *fail_unservable(state, now), *refuse_late(state, now)


def _lose(state: CoreState, address: str, now: float) -> tuple[Failure, ...]:
    state.executors.resolved(address)
    executor = state.executors.by_address.get(address)
    if executor is None:
        return ()
    blamed, unanswered = _in_step(executor), executor.unanswered_steps()
    for live in state.take_off_rows(address).values():
        state.wait_again(live, now)
    failures = _blame_all(state, blamed, now)
    lost = Attachment(executor.description)
    lost.attached = False
    lost.inherit(executor)
    lost.suspects.died(executor.suspects, unanswered, blamed)
    state.executors.by_address[address] = lost
    return failures


def join(state: CoreState, live: LiveRequest, request: Request, now: float) -> Resumed:
    """From the first token that the client lacks."""
    offset, output = request.point.resume_from, state.output_of(live)
    # What follows must not look older than the client has seen.
    live.attempt = max(live.attempt, request.point.last_attempt)
    if live.final is None:
        live.phases.fill_in(request.waited_s, now)
        state.requests.listen(live, request)
        if live.held is not None:
            state.executors.by_address[live.held.address].ledger.deliver_to(live.held.row, request.handle, live.attempt)
    else:
        live.request = with_listener_of(live.request, request)
    reason = FinishReason.NONE if live.final is None else live.final.reason
    rest = output[offset:]
    if not len(rest) and reason is FinishReason.NONE:
        return Resumed(output[:offset], None)
    logprobs = () if live.output.logprobs is None else live.output.logprobs.between(offset, len(output)) or ()
    output_hash = rolling_hash(request.point.resume_hash, rest)
    return Resumed(output[:offset], outputs_of(live, offset, rest, output_hash, reason, logprobs))


def restart(state: CoreState, live: LiveRequest, request: Request, now: float) -> Resumed:
    """Goes on from what the client holds instead of the output here."""
    ended = ended_by_prior(state, request)
    if ended is not None:
        state.give_up(live, now)
        return ended
    if live.held is None:
        state.executors.forget_records(live.request.key)  # they hold the other output
    state.unplace(live, now)
    live.phases.fill_in(request.waited_s, now)
    prior = prior_of(request)
    live.output.go_on_from(prior)
    live.output.forget_logprobs()
    live.attempt = max(live.attempt, request.point.last_attempt)
    state.requests.listen(live, request)
    state.waiting.add(live)
    return Resumed(prior, None)


def ended_by_prior(state: CoreState, request: Request) -> Resumed | None:
    """The client lacks only the finish."""
    prior = prior_of(request)
    if not len(prior):
        return None
    reason = end_of_prior(request, prior, _num_allowed(state, request))
    if reason is FinishReason.NONE:
        return None
    clock = PhaseClock(0.0, 0.0, is_partial=True)
    live = LiveRequest(request, queue_key_of(request, 0, 0.0), clock, attempt=request.point.last_attempt)
    return Resumed(prior, outputs_of(live, len(prior), prior[:0], rolling_hash(HASH_START, prior), reason))


def _num_allowed(state: CoreState, request: Request) -> int:
    serving = (e.description for e in state.executors if e.description.model == request.model)
    room = max((description.max_request_tokens for description in serving), default=0) - len(request.prompt_token_ids)
    return request.max_tokens or max(room, 1)


def _claim(state: CoreState, seen: SeenRow, model: str, is_new: bool, now: float) -> LiveRequest | None:
    """Takes the request that should go on from this row from wherever it is."""
    live = state.requests.by_key(seen.record_id)
    if live is not None and live.final is None:
        if not (is_new and is_adoptable(seen) and has_ended_elsewhere(seen, live)):
            return _switch(state, live, seen, now)
        state.give_up(live, now)
        state.replace_previous(live)
        live = None
    if live is not None and not live.had_listener and seen.attempt > live.attempt and is_adoptable(seen):
        state.replace_previous(live)
        live = None
    retained = state.requests.retained(seen.record_id)
    if live is not None or not is_new or not is_adoptable(seen) or (retained and retained.attempt >= seen.attempt):
        return None
    state.requests.drop_retained(seen.record_id)
    state.num_arrivals += 1
    live = adopted(seen, model, state.requests.new_handle(), state.num_arrivals, now)
    if live.final is not None:
        state.requests.retain(live, now)
        return None
    state.requests.add(live)
    state.requests.detach(live, now)
    return live


def _switch(state: CoreState, live: LiveRequest, seen: SeenRow, now: float) -> LiveRequest | None:
    """Only a row that counts for more than where the request is."""
    here = state.output_of(live)
    if not outranks(seen, live, here):
        return None
    state.unplace(live, now)
    live.attempt = seen.attempt
    if live.detached_until_s is not None:
        live.output.go_on_from(seen.output_token_ids)
    return live


def _in_step(executor: Attachment | None) -> list[LiveRequest]:
    if executor is None or not executor.in_flight:
        return []
    found = (executor.ledger.rows.live[row] for row in executor.in_flight[0].index.tolist())
    return [live for live in found if live is not None and not live.is_orphan]


def _try_again(
    state: CoreState, culprit: LiveRequest, description: ExecutorDescription, now: float
) -> tuple[Failure, ...]:
    """A step of its own failed: try once more, elsewhere if possible."""
    if not state.requests.is_open(culprit) or description.failed_step is None:
        return ()
    if culprit.suspicion.blame_lone_failure(description.address):
        state.give_up(culprit, now)
        return (Failure(culprit.request.handle, StepFailedError(description.failed_step.message)),)
    others = (other for other in state.executors.serving(description.model) if other.description is not description)
    if culprit.held is not None and any(culprit.fits(other.description) for other in others):
        state.unplace(culprit, now)
        state.waiting.add(culprit)
    return ()


def _blame_all(state: CoreState, blamed: list[LiveRequest], now: float) -> tuple[Failure, ...]:
    """Their rows are gone; returns the failure of the one that caused the death."""
    culprit = blame_deaths(blamed)
    if culprit is None or not state.requests.is_open(culprit):
        return ()
    state.give_up(culprit, now)
    return (Failure(culprit.request.handle, QuarantinedError(culprit.suspicion.quarantine_sentence())),)
