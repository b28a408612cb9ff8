"""What is said of requests to those who ask.

Planning itself looks at the same, so the sentences are as true as the next plan.
"""

from collections.abc import Mapping, Sequence

from paceline_scheduler.core.answers import Estimate, Explanation, RequestState
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Status
from paceline_scheduler.core.planning.capacity import Blocker, Capacity
from paceline_scheduler.core.planning.forecast import Ahead
from paceline_scheduler.core.queue.outlook import outlook_of
from paceline_scheduler.core.queue.waiting import WaitingQueue
from paceline_scheduler.errors import SchedulerError


class Explainer:
    """Explains requests as of one moment: what keeps the first of a model's queue waiting is found once."""

    def __init__(
        self, executors: Mapping[str, Attachment], waiting: WaitingQueue, limits: CoreLimits, now: float
    ) -> None:
        self._executors = executors
        self._waiting = waiting
        self._limits = limits
        self._now = now
        self._blockers: dict[str, str] = {}  # by model

    def explain(self, live: LiveRequest) -> Explanation:
        executor = None if live.held is None else self._executors[live.held.address]
        position, num_computed, num_output = 0, 0, live.num_output_tokens
        waiting_for, drafts = "", live.output.drafts
        if live.held is not None and executor is not None:
            rows, row = executor.ledger.rows, live.held.row
            num_computed, num_output, drafts = int(rows.num_computed[row]), rows.num_output(row), rows.drafts(row)
        if live.status is Status.PREEMPTED:
            waiting_for = f"{live.address} has to confirm that it stopped"
        elif live.status is Status.WAITING:
            position = self._waiting.position(live)
            waiting_for = _behind(position, self._blocker(live.request.model))
        elif live.status is Status.RUNNING and executor is not None and not executor.attached:
            waiting_for = f"{live.address} has to attach again"
        return Explanation(
            state=state_of(live),
            waiting_for=waiting_for,
            queue_position=position,
            num_preemptions=live.preemptions.count,
            preemption_reason=live.preemptions.reason,
            executor=live.address if live.address and live.status is Status.RUNNING else "",
            num_computed_tokens=num_computed,
            num_output_tokens=num_output,
            times=live.phases.times(self._now),
            drafts=drafts,
        )

    def _blocker(self, model: str) -> str:
        sentence = self._blockers.get(model)
        if sentence is None:
            head = self._waiting.of_model(model)[0]
            sentence = self._blockers[model] = _blocker(head, self._executors, self._limits)
        return sentence


def state_of(live: LiveRequest) -> RequestState:
    """Return what is said of where a request stands."""
    if live.status is Status.WAITING and live.preemptions.reason:
        return RequestState.PREEMPTED
    return _STATES[live.status]


def estimate(
    live: LiveRequest,
    serving: Sequence[Attachment],
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


def _behind(position: int, sentence: str) -> str:
    if not position:
        return sentence
    requests = "1 request is" if position == 1 else f"{position} requests are"
    return f"{requests} ahead; for the first of them: {sentence}"


def _blocker(live: LiveRequest, executors: Mapping[str, Attachment], limits: CoreLimits) -> str:
    sentences = []
    for address, executor in sorted(executors.items()):
        if executor.description.model != live.request.model:
            continue
        if not executor.attached:
            sentences.append(f"{address} has to attach")
        elif executor.draining:
            sentences.append(f"{address} is being drained")
        else:
            fit = Capacity(executor.view(), limits).fit(live)
            has_room = f"the next plan of {address}, which has room for it"
            sentences.append(fit.sentence if isinstance(fit, Blocker) else has_room)
    return "; ".join(sentences) or awaited_executor(live.request.model)


def awaited_executor(model: str) -> str:
    of_model = f" of the model {model!r}" if model else ""
    return f"an executor{of_model} has to attach"
