"""Tells leadership what the links see, with the time and a little chance, and does what it says.

Refuses to know connections, and decides nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from paceline.plan.values import Claim, ExecutorInfo, Hello
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.errors import LinkError, SchedulerError
from paceline_scheduler.link.leadership import Detached, Displaced, EndStream, InLine, Leadership, Lost, Verdict
from paceline_scheduler.link.link_listener import LinkListener

_LOG_REMINDER_S = 10.0
_PATIENCE_S = 10.0  # a missing executor is no news at its start

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class UnreachableLog:
    """Logs at once, then now and then.

    An executor that starts, or loads its model, is waited for first: nobody reads a warning that every start has.
    """

    address: str
    expected_s: float
    _was_attached: bool = False
    _reason: str = ""
    _num_attempts: int = 0
    _logged_s: float = 0.0

    def note(self, reason: str, now_s: float, *, is_loading: bool) -> None:
        self._num_attempts += 1
        if reason == self._reason and now_s - self._logged_s < _LOG_REMINDER_S:
            return
        self._reason, self._logged_s = reason, now_s
        is_starting = not self._was_attached and now_s - self.expected_s < _PATIENCE_S
        tell, event = (
            (log.info, "waiting_for_executor") if is_starting or is_loading else (log.warning, "executor_unreachable")
        )
        tell(event, address=self.address, reason=reason, attempts=self._num_attempts)

    def settle(self) -> None:
        """The next failure is news."""
        self._was_attached, self._reason, self._num_attempts = True, "", 0


class Steward:
    """`end_stream` ends an executor's stream, if there is one."""

    def __init__(
        self,
        leadership: Leadership,
        listener: LinkListener,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        end_stream: Callable[[str, LinkError], None],
    ) -> None:
        self.listener = listener
        self.clock = clock
        self._leadership = leadership
        self._jitter = jitter
        self._end_stream = end_stream
        self._unreachable: dict[str, UnreachableLog] = {}
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, address: str) -> None:
        self._unreachable[address] = UnreachableLog(address, self.clock())
        self._leadership.expect(address, self.clock())
        self.listener.expected(address)
        self._carry_out(())

    def remove(self, address: str) -> None:
        log.info("executor_removed", address=address)
        del self._unreachable[address]
        self.listener.removed(address)  # before: until then it asks about it
        self._leadership.remove(address)
        self._carry_out(())

    def found(self, address: str, info: ExecutorInfo) -> Hello | None:
        """Returns None while the executor is for another scheduler."""
        greeting = self._leadership.found(address, info, self.clock(), self._jitter())
        if greeting is None:
            return None
        self._carry_out(greeting.verdicts)
        return greeting.hello

    async def until_dial(self, address: str) -> None:
        await asyncio.sleep(max(0.0, self._leadership[address].redial.at_s - self.clock()))

    def in_line(self, address: str, holder: Claim) -> None:
        self._carry_out(self._leadership.in_line(address, holder, self.clock()))

    def syncing(self, address: str, incarnation: int) -> None:
        self._leadership.syncing(address, incarnation)

    def welcomed(self, description: ExecutorDescription) -> None:
        self._leadership.welcomed(description, self.clock())
        self._unreachable[description.address].settle()
        self._wake_at(self._leadership.next_change_s())

    def ended(self, address: str, error: SchedulerError) -> None:
        self._carry_out(self._leadership.ended(address, error, self.clock(), self._jitter()))

    def drains(self, address: str) -> None:
        """The listener hears of it once the executor is attached."""
        if self._leadership.drains(address):
            self.listener.draining(address)

    def is_drain_due(self, address: str) -> bool:
        return self._leadership[address].is_drain_due

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _carry_out(self, verdicts: tuple[Verdict, ...]) -> None:
        for verdict in verdicts:
            match verdict:
                case Detached(address, reason) as end:
                    self._log_end(end)
                    self.listener.detached(address, reason)
                case Lost(address, was_serving):
                    if was_serving:
                        log.warning("executor_lost", address=address)
                    self.listener.lost(address)
                case InLine(address, holder):
                    self.listener.in_line(address)
                    log.info("waiting_in_line", address=address, active_address=holder.address, term=holder.term)
                case Displaced(active):
                    where = {"active_address": active.address, "term": active.term}
                    log.warning("displaced", reason=f"{active} took over", **where)
                    self.listener.displaced(active)
                case EndStream(address, error):
                    self._end_stream(address, error)
        self._wake_at(self._leadership.next_change_s())
        self.listener.changed()

    def _log_end(self, end: Detached) -> None:
        if end.was_driven:
            log.warning("executor_detached", address=end.address, reason=end.reason)
        else:
            self._unreachable[end.address].note(end.reason, self.clock(), is_loading=end.is_loading)

    def _wake_at(self, at_s: float | None) -> None:
        self.stop()
        if at_s is not None:
            wait_s = max(0.0, at_s - self.clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake, at_s)

    def _wake(self, at_s: float) -> None:
        """Timers may fire a moment early."""
        self._carry_out(self._leadership.advance(max(at_s, self.clock())))
