"""What the scheduler shows of itself on the metrics port: what `observers.serving` counted, and gauges.

Keeps nothing from one look to the next.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from paceline.plan.values import RecordId
from paceline.process.metrics import Definition, Labels, Meter, Reading
from paceline.process.metrics_port import MetricsPort
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.observers import definitions
from paceline_scheduler.observers.request_log import RequestLog
from paceline_scheduler.observers.serving import ServingObserver
from paceline_scheduler.observers.steps import StepTotals
from paceline_scheduler.runtime import Runtime

_MAX_POSITIONS = 16
_LATER_POSITIONS = "later"


class Metrics:
    def __init__(
        self,
        meter: Meter,
        views: CoreViews,
        executors: LinkedExecutors,
        num_lost_log_lines: Callable[[], int],
        span_counts: Callable[[], Mapping[str, int]] = dict,
        idle_ns: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._meter = meter
        self._views = views
        self._executors = executors
        self._num_lost_log_lines = num_lost_log_lines
        self._span_counts = span_counts
        self._idle_ns = idle_ns
        self.port = MetricsPort(self.read)

    def read(self) -> list[Reading]:
        statuses = self._executors.statuses()
        gauges: dict[Definition, dict[Labels, float]] = {definition: {} for definition in definitions.READ}
        gauges[definitions.LOG_LINES_LOST][()] = self._num_lost_log_lines()
        gauges[definitions.SPANS].update({(state,): count for state, count in self._span_counts().items()})
        states = Counter(ShownState(status.state).name.lower() for status in statuses)
        for state in ShownState:
            gauges[definitions.EXECUTORS][state.name.lower(),] = states[state.name.lower()]
        for status in statuses:
            _read_executor(status, gauges)
            gauges[definitions.IDLE][status.address,] = self._idle_ns(status.address) / 1e9
        self._read_models(statuses, gauges)
        return [*self._meter.read(), *(Reading(definition, values) for definition, values in gauges.items())]

    def _read_models(self, statuses: tuple[ExecutorStatus, ...], gauges: dict[Definition, dict[Labels, float]]) -> None:
        waiting = self._views.num_waiting_by_model()
        for model in sorted({status.model for status in statuses if status.model} | waiting.keys()):
            of_model = [status for status in statuses if status.model == model]
            num_blocks = sum(status.num_total_blocks for status in of_model)
            num_used = sum(status.num_used_blocks for status in of_model)
            gauges[definitions.NUM_RUNNING][model,] = sum(status.num_running_requests for status in of_model)
            gauges[definitions.NUM_WAITING][model,] = waiting.get(model, 0)
            gauges[definitions.KV_USAGE][model,] = num_used / max(1, num_blocks)
        for status in statuses:
            description = self._views.description(status.address)
            if description is not None:
                sizes = str(description.block_size), str(description.num_blocks)
                gauges[definitions.CACHE_INFO][description.model, status.address, *sizes] = 1


def observe(runtime: Runtime, edge: Edge, log_requests: float) -> Meter:
    """Also logs this share of the requests; returns what counts."""
    meter = Meter(definitions.COUNTED)
    request_log = RequestLog(log_requests)

    def refused(key: RecordId, model: str, trace_parent: str, error: SchedulerError) -> None:
        count_refusal(meter, error)
        request_log.refused(key, model, trace_parent, error)

    runtime.show_plans(ServingObserver(meter, runtime.after_turn))
    runtime.show(request_log)
    edge.on_refusal(refused)
    edge.texts.forms.on_checked = partial(meter.observe, "form_check_seconds")
    return meter


def count_refusal(meter: Meter, error: SchedulerError) -> None:
    meter.add("admission_rejections_total", 1, error.reason)


def _read_executor(status: ExecutorStatus, gauges: dict[Definition, dict[Labels, float]]) -> None:
    address = status.address
    for state, num_blocks in (
        ("free", status.num_free_blocks),
        ("cached", status.num_cached_blocks),
        ("used", status.num_used_blocks),
        ("quarantined", status.num_quarantined_blocks),
    ):
        gauges[definitions.KV_BLOCKS][address, state] = num_blocks
    gauges[definitions.KV_SLOTS_FILLED][address,] = status.num_filled_slots / max(1, status.num_owned_slots)
    gauges[definitions.LOST_FOR][address, status.model] = status.lost_for_s or 0.0
    gauges[definitions.PLANS_IN_FLIGHT][address,] = status.num_plans_in_flight
    gauges[definitions.STARVED][address,] = status.steps.starved_ns / 1e9
    _read_drafts(address, status.steps, gauges)
    gauges[definitions.SAVED][address,] = status.draft_saved_ns / 1e9


def _read_drafts(address: str, steps: StepTotals, gauges: dict[Definition, dict[Labels, float]]) -> None:
    drafts = steps.drafts
    gauges[definitions.DRAFTED][address,] = drafts.num_verified
    gauges[definitions.ACCEPTED][address,] = drafts.num_accepted
    gauges[definitions.DRAFTING][address,] = steps.draft_ns / 1e9
    for definition, counts in (
        (definitions.DRAFTED_AT, drafts.num_verified_at),
        (definitions.ACCEPTED_AT, drafts.num_accepted_at),
    ):
        for position, count in enumerate(counts[:_MAX_POSITIONS]):
            gauges[definition][address, str(position)] = count
        if len(counts) > _MAX_POSITIONS:
            gauges[definition][address, _LATER_POSITIONS] = sum(counts[_MAX_POSITIONS:])
