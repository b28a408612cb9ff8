"""What is said of requests to those who ask.

Planning itself looks at the same, so the sentences are as true as the next plan.
"""

from collections.abc import Mapping, Sequence

from paceline_scheduler.core.answers import Estimate, Explanation, RequestState
from paceline_scheduler.core.executor.state import ExecutorState
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Status
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, Fit
from paceline_scheduler.core.planning.forecast import Ahead
from paceline_scheduler.core.queue.outlook import outlook_of
from paceline_scheduler.errors import SchedulerError


def explain(
    live: LiveRequest,
    executors: Mapping[str, ExecutorState],
    queue: Sequence[LiveRequest],
    position: int,
    limits: CoreLimits,
    now: float,
) -> Explanation:
    """`position` is its index in the queue, 0 unless it waits."""
    executor = None if live.held is None else executors[live.held.address]
    state, waiting_for, num_computed, num_output = _STATES[live.status], "", 0, live.num_output_tokens
    drafts = live.output.drafts
    if live.held is not None and executor is not None:
        row = live.held.row
        num_computed, num_output = int(executor.rows.num_computed[row]), executor.rows.num_output(row)
        drafts = executor.rows.drafts(row)
    if live.status is Status.PREEMPTED:
        waiting_for = f"{live.address} has to confirm that it stopped"
    elif live.status is Status.WAITING:
        waiting_for = _waiting_for(queue[0], executors, position, limits)
        state = RequestState.PREEMPTED if live.preemptions.reason else RequestState.WAITING
    elif live.status is Status.RUNNING and executor is not None and not executor.attached:
        waiting_for = f"{live.address} has to attach again"
    return Explanation(
        state=state,
        waiting_for=waiting_for,
        queue_position=position,
        num_preemptions=live.preemptions.count,
        preemption_reason=live.preemptions.reason,
        executor=live.address if live.address and live.status is Status.RUNNING else "",
        num_computed_tokens=num_computed,
        num_output_tokens=num_output,
        times=live.phases.times(now),
        drafts=drafts,
    )


def estimate(
    live: LiveRequest,
    serving: Sequence[ExecutorState],
    ahead: Ahead,
    limits: CoreLimits,
    refusal: SchedulerError | None,
) -> Estimate:
    serving = [executor for executor in serving if live.fits(executor.description)]
    if not serving:
        return Estimate(0.0, 0.0, live.num_prompt_tokens, 0, refusal)
    outlook = outlook_of(live, serving, ahead, limits)
    is_taken = refusal is None
    return Estimate(
        time_to_first_token_s=outlook.first_token_s if is_taken else 0.0,
        inter_token_s=outlook.between_tokens_s if is_taken else 0.0,
        num_prompt_tokens=live.num_prompt_tokens,
        num_cached_tokens=outlook.num_cached_tokens,
        refusal=refusal,
    )


_STATES = {
    Status.WAITING: RequestState.WAITING,
    Status.RUNNING: RequestState.RUNNING,
    Status.PREEMPTED: RequestState.PREEMPTED,
    Status.FINISHED: RequestState.FINISHED,
}


def _waiting_for(head: LiveRequest, executors: Mapping[str, ExecutorState], position: int, limits: CoreLimits) -> str:
    sentence = _blocker(head, executors, limits)
    if not position:
        return sentence
    requests = "1 more urgent request is" if position == 1 else f"{position} more urgent requests are"
    return f"{requests} ahead; for the first of them: {sentence}"


def _blocker(live: LiveRequest, executors: Mapping[str, ExecutorState], limits: CoreLimits) -> str:
    sentences = []
    for address, executor in sorted(executors.items()):
        if executor.description.model != live.request.model:
            continue
        if not executor.attached:
            sentences.append(f"{address} has to attach")
        elif executor.draining:
            sentences.append(f"{address} is being drained")
        else:
            sentences.append(_blocker_on(live, executor, limits))
    return "; ".join(sentences) or f"an executor of the model {live.request.model!r} has to attach"


def _blocker_on(live: LiveRequest, executor: ExecutorState, limits: CoreLimits) -> str:
    view = executor.view()
    match Capacity(view, view.pool.num_available, limits).fit(live):
        case Blocker(sentence=sentence):
            return sentence
        case Fit():
            return f"the next plan of {executor.description.address}, which has room for it"
