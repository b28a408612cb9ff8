"""A line in the log for each finished or refused request of a sample.

The sample goes by the request's id: schedulers that see the same request agree, and all of its completions are in it.
"""

import zlib
from typing import Any

import structlog

from paceline.plan.values import RecordId
from paceline.process.trace_ids import trace_fields
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import Effects, Event
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.observers.serving import end_name

_log = structlog.get_logger(__name__)


class RequestLog:
    """`share` of the requests has lines, 0 to 1."""

    def __init__(self, share: float) -> None:
        self._share = share

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        del event, now
        if not self._share or not effects.ended:
            return
        errors = {failure.handle: failure.error for failure in effects.failures}
        for ended in effects.ended:
            if self._is_told(ended.request.key):
                error = errors.get(ended.request.handle)
                self._tell(ended, end_name(ended) if error is None else error.reason)

    def refused(self, key: RecordId, model: str, trace_parent: str, error: SchedulerError) -> None:
        """Nothing that the request says was checked."""
        if self._share and self._is_told(key):
            names = {"request_id": key.request_id, "tenant": key.tenant, "model": model, **trace_fields(trace_parent)}
            _log.info("request_refused", **names, reason=error.reason)

    def _is_told(self, key: RecordId) -> bool:
        return zlib.crc32(key.request_id.encode(errors="replace")) < self._share * 2**32

    def _tell(self, ended: EndedRequest, reason: str) -> None:
        request, times = ended.request, ended.times
        _log.info(
            "request_finished",
            request_id=request.key.request_id,
            index=request.key.index,
            tenant=request.key.tenant,
            model=request.model,
            **trace_fields(request.trace_parent),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=ended.num_cached_tokens,
            num_output_tokens=ended.num_output_tokens,
            num_preemptions=ended.num_preemptions,
            queued_s=_rounded(None if times is None else times.queued_s),
            ttft_s=_rounded(ended.first_token_s),
            tpot_s=_rounded(ended.seconds_per_token),
            e2e_s=_rounded(None if times is None else times.total_s),
            reason=reason,
            executor=ended.executor,
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
