"""Says how this scheduler stands, to health checks and in the log.

Refuses to know why a scheduler stands as it does.
"""

from collections.abc import Callable, Mapping

import structlog

from paceline.plan.values import Claim
from paceline_scheduler.link.leadership import Readiness, ServingStatus

_log = structlog.get_logger(__name__)


class Announcer:
    """`ready_when` are the statuses in which health says SERVING. `where` goes into each `ready`, as the ports do;
    `is_stopping`: nobody needs to know why not.
    """

    def __init__(
        self,
        ready_when: frozenset[ServingStatus],
        set_ready: Callable[[bool], None],
        models: Callable[[], list[str]],
        is_stopping: Callable[[], bool],
        where: Mapping[str, object],
    ) -> None:
        self._ready_when = ready_when
        self._set_ready = set_ready
        self._models = models
        self._is_stopping = is_stopping
        self._where = where
        self._status = ServingStatus.NOT_SERVING

    def changed(self, readiness: Readiness) -> None:
        before, self._status = self._status, readiness.status
        is_ready = self._status in self._ready_when
        self._set_ready(is_ready)
        if readiness.status is ServingStatus.SERVING:
            _log.info("ready", models=self._models(), **self._where)
        elif readiness.active is not None:
            self._stands_by(readiness.active, is_new=is_ready and before is not ServingStatus.STANDBY)
        elif not self._is_stopping():
            _log.warning("not_ready", reason="no executor takes new requests; they are refused until one does")

    def _stands_by(self, active: Claim, *, is_new: bool) -> None:
        _log.info(
            "standing_by",
            reason=f"{active} serves",
            active_address=active.address,
            active_scheduler_id=active.scheduler_id,
            active_term=active.term,
        )
        if is_new:
            _log.info("ready", standby=True, **self._where)
