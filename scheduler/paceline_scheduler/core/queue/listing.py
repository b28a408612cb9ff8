"""Requests for operators, so many at a time. Refuses to know prompts and outputs."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest

from paceline_scheduler.core.answers import ListedRequest, ListedRequests, RequestState
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.queue.explain import Explainer, state_of

MAX_LISTED = 200
"""At a time: meanwhile no step is planned."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests are asked for: those of a tenant, in some states, that arrived after that number; at most so many.

    None and no states: of all tenants, in all states.
    """

    tenant: str | None = None
    states: frozenset[RequestState] = frozenset()
    after: int = 0
    at_most: int = MAX_LISTED

    def holds(self, live: LiveRequest) -> bool:
        return (
            _arrival_number(live) > self.after
            and (self.tenant is None or live.request.key.tenant == self.tenant)
            and (not self.states or state_of(live) in self.states)
        )


def choose(requests: Iterable[LiveRequest], selection: Selection, explainer: Explainer, now: float) -> ListedRequests:
    """Return the oldest of the selected requests. What arrives between two answers is behind both."""
    found = nsmallest(selection.at_most + 1, filter(selection.holds, requests), key=_arrival_number)
    shown = found[: selection.at_most]
    next_after = _arrival_number(shown[-1]) if len(found) > len(shown) else None
    return ListedRequests(tuple(_listed(live, explainer, now) for live in shown), next_after)


def _listed(live: LiveRequest, explainer: Explainer, now: float) -> ListedRequest:
    request = live.request
    return ListedRequest(
        key=request.key,
        model=request.model,
        priority=request.priority,
        num_prompt_tokens=live.num_prompt_tokens,
        max_tokens=request.max_tokens,
        has_listener=live.had_listener and live.detached_until_s is None,
        age_s=max(0.0, now - live.phases.submitted_s),
        time_left_s=None if request.deadline_s is None else max(0.0, request.deadline_s - now),
        explanation=explainer.explain(live),
    )


def _arrival_number(live: LiveRequest) -> int:
    return live.queue_key[1]
