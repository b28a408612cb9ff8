"""What operators see of a scheduler: every metric exists, moves when its subject does, and counts what happened."""

import asyncio
import re
from bisect import bisect_left
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from both_sides.deployment import Deployment, scenario
from edge_rig.tokenizers import try_here
from paceline.plan.values import FinishReason, RecordId, StepTimings
from paceline.process.callers import ANYBODY
from paceline.process.metrics import Histogram, Meter
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    Cancel,
    Effects,
    EndCompletion,
    ExecutorAttached,
    ExecutorRemoved,
    StepFinished,
    Tick,
)
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.errors import InvalidRequestError
from paceline_scheduler.observers.definitions import BETWEEN_TOKENS_BOUNDS_S, COUNTED, READ
from paceline_scheduler.observers.recoveries import Recoveries
from paceline_scheduler.observers.request_log import RequestLog
from paceline_scheduler.observers.serving import MAX_TENANTS, OTHER_TENANTS, ServingObserver
from paceline_scheduler.observers.steps import DraftTotals
from paceline_scheduler.telemetry.metrics import Metrics, observe
from paceline_scheduler.telemetry.statistics import Statistics
from scheduler_rig.requests import make_request
from virtual_time import in_virtual_time, now

ADDRESS = "executor:1"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE_PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
CONSTANT = {"cache_config_info"}


def plain(value):
    """A value that can be compared."""
    return (*value.counts, value.total) if isinstance(value, Histogram) else value


class Watched:
    """The metrics of a scheduler, read again and again."""

    def __init__(self, rig):
        self.rig = rig
        self.num_lost_lines = 0
        self.edge = Edge(rig.runtime, rig.executors, Texts(EdgeLimits(), datetime.now, trial=try_here), EdgeLimits())
        self.meter = observe(rig.runtime, self.edge, 0.0)
        self.metrics = Metrics(
            self.meter,
            rig.runtime.views,
            rig.executors,
            lambda: self.num_lost_lines,
            lambda: {"sent": self.num_lost_lines},
            lambda address: rig.steps.idle_ns(address, rig.runtime.now_s()),
        )
        self.seen = {}  # by name: all that was read

    def look(self):
        """Remember every value, and return the readings by name."""
        readings = {reading.definition.name: reading.values for reading in self.metrics.read()}
        for name, values in readings.items():
            self.seen.setdefault(name, set()).add(tuple((labels, plain(value)) for labels, value in values.items()))
        return readings

    async def look_until(self, holds):
        while not holds():
            self.look()
            await asyncio.sleep(0.0005)
        self.look()

    def refuse(self):
        """Let a client send a request without an id."""
        outbox = self.edge.open_outbox()
        with pytest.raises(InvalidRequestError):
            self.edge.open(GenerateRequest(), outbox, ANYBODY)
        self.edge.close_outbox(outbox)


@asynccontextmanager
async def watching(*addresses, **capacity):
    """A scheduler that has attached to these executors, and its metrics."""
    async with Deployment(*addresses, **capacity) as deployment, deployment.rig() as rig:
        watched = Watched(rig)
        await rig.until_ready(len(addresses))
        yield deployment, rig, watched


def expect_short_outputs(rig):
    """Let the core admit more than the pool can hold."""
    lengths = rig.runtime.views.executor(ADDRESS).output_lengths
    lengths.mean = lengths.deviation = 1.0


@scenario
async def test_every_metric_exists_and_moves():
    async with watching(ADDRESS, num_blocks=14) as (deployment, rig, watched):
        watched.look()
        prompt = list(range(5, 14))
        for round_index in range(4):
            expect_short_outputs(rig)
            requests = [make_request(prompt, 24, tenant=f"tenant-{round_index}") for _ in range(6)]
            rig.submit(*requests)
            await watched.look_until(lambda: not any(rig.runtime.views.with_listener()))
        watched.refuse()
        watched.edge.texts.forms.on_checked(0.001)
        rig.submit(*(make_request(4, 20) for _ in range(3)))
        await asyncio.sleep(0.01)
        deployment[ADDRESS].break_stream()
        await watched.look_until(lambda: not any(rig.runtime.views.with_listener()))
        deployment.network.stop(ADDRESS)
        await watched.look_until(lambda: rig.executors.statuses()[0].lost_for_s)
        deployment.network.start(ADDRESS)
        await rig.until_ready()
        watched.num_lost_lines = 1
        totals = rig.steps._executors[ADDRESS].totals
        totals.starved_ns += 5  # in virtual time no plan is ever late
        totals.draft_ns += 5  # nor does drafting take time
        totals.drafts = DraftTotals(9, 4, (5, 4), (3, 1))
        rig.runtime.views.executor(ADDRESS).speculation.saved_ns += 5
        readings = watched.look()
    assert readings.keys() == {definition.name for definition in (*READ, *COUNTED)}
    assert {name for name, values in watched.seen.items() if len(values) < 2} == CONSTANT
    assert readings["request_success_total"]["simulated", "length"] == 27
    assert readings["recoveries_total"]["stream",] == 1
    assert readings["admission_rejections_total"]["INVALID_FIELD",] == 1
    assert readings["generation_tokens_total"]["simulated",] == 24 * 24 + 3 * 20
    assert readings["prompt_tokens_total"]["simulated",] == 24 * 9 + 3 * 4
    assert readings["tenant_requests_total"]["tenant-0",] == 6


@scenario
async def test_drafts_are_counted_by_place_and_late_places_together():
    """Of 63 places the first 16 have a label each: the sum over all is that of the drafts."""
    async with watching(ADDRESS) as (_, rig, watched):
        drafted, accepted = tuple(range(163, 100, -1)), tuple(range(63, 0, -1))
        totals = rig.steps._executors[ADDRESS].totals
        totals.drafts = DraftTotals(sum(drafted), sum(accepted), drafted, accepted)
        readings = watched.look()
    for name, by_place in (("draft", drafted), ("accepted", accepted)):
        places = readings[f"spec_decode_num_{name}_tokens_per_pos_total"]
        assert [places[ADDRESS, str(place)] for place in range(16)] == list(by_place[:16])
        assert len(places) == 17
        assert sum(places.values()) == readings[f"spec_decode_num_{name}_tokens_total"][ADDRESS,] == sum(by_place)


@scenario
async def test_blocks_and_slots_are_those_of_the_executor():
    """Free, cached and used add up; a request of 5 tokens on 4-slot blocks fills 5 of 8 slots, or one more."""
    async with watching(ADDRESS, num_blocks=14) as (_, rig, watched):
        rig.submit(make_request(5, 50))
        await rig.until(lambda: rig.runtime.views.counts(ADDRESS).num_filled_slots > 0)
        readings = watched.look()
        blocks = {labels[1]: number for labels, number in readings["kv_blocks"].items()}
        counts = rig.runtime.views.counts(ADDRESS)
        filled = counts.num_filled_slots / counts.num_owned_slots
    assert sum(blocks.values()) == 14
    assert readings["kv_cache_usage_perc"]["simulated",] == pytest.approx(blocks["used"] / 14)
    assert readings["kv_slots_filled_ratio"][ADDRESS,] == pytest.approx(filled)
    assert readings["cache_config_info"] == {("simulated", ADDRESS, "4", "14"): 1}
    assert readings["num_requests_running"]["simulated",] == 1


@pytest.mark.parametrize("has_run", [True, False])
@in_virtual_time
async def test_an_executor_that_comes_back_as_another_process_is_a_recovery_if_it_had_run_anything(has_run):
    async with watching(ADDRESS) as (deployment, rig, watched):
        if has_run:
            rig.submit(make_request(4, 50))
            await asyncio.sleep(0.01)
        deployment.network.stop(ADDRESS)
        await asyncio.sleep(0.5)
        deployment.network.start(ADDRESS)
        await rig.until_ready()
        rig.submit(make_request(4, 5))
        await rig.until_idle()
        readings = watched.look()
    assert readings["recoveries_total"] == ({("executor",): 1} if has_run else {})
    pauses = [pause.total for pause in readings["recovery_pause_seconds"].values()]
    assert len(pauses) == has_run
    assert all(0 < pause_s < 60 for pause_s in pauses)


def pause_of(watched, kind):
    """What was observed of this kind, in seconds: nothing, or one pause."""
    pause = watched.look()["recovery_pause_seconds"].get((kind,))
    return None if pause is None or not sum(pause.counts) else pause.total / sum(pause.counts)


@scenario
async def test_a_pause_lasts_until_requests_of_the_only_executor_run_again():
    async with watching(ADDRESS) as (deployment, rig, watched):
        rig.submit(make_request(4, 50), make_request(4, 50))
        await asyncio.sleep(0.01)
        deployment.network.stop(ADDRESS)
        await asyncio.sleep(50)
        assert watched.look()["recoveries_total"] == {}, "its requests still wait"
        assert watched.look()["executor_lost_seconds"][ADDRESS, "simulated"] == pytest.approx(50, abs=0.1)
        assert pause_of(watched, "executor") is None
        deployment.network.start(ADDRESS)
        await rig.until_idle()
        assert watched.look()["recoveries_total"] == {("executor",): 1}
        waited_s = min(finish.times.preempted_s for finish in rig.client.finishes.values())
        assert waited_s > 49
        assert pause_of(watched, "executor") == pytest.approx(waited_s, abs=0.1)
        readings = watched.look()
        gaps_s, means_s = (
            readings[f"{name}_seconds"]["simulated",].total
            for name in ("inter_token_latency", "request_time_per_output_token")
        )
        assert gaps_s == pytest.approx(49 * means_s), "the time without a row counts in both"
        assert gaps_s > 49
        assert readings["executor_lost_seconds"][ADDRESS, "simulated"] == 0


@scenario
async def test_a_pause_lasts_until_requests_of_a_lost_executor_get_a_row_elsewhere():
    """The other one has a row only, which is taken."""
    async with watching(ADDRESS, "executor:2", max_num_rows=1) as (deployment, rig, watched):
        rig.submit(make_request(4, 200), make_request(4, 200))
        await asyncio.sleep(0.01)
        deployment.network.stop(ADDRESS)
        await rig.until_idle()
        waited_s = max(finish.times.preempted_s for finish in rig.client.finishes.values())
        assert watched.look()["recoveries_total"] == {("executor",): 1}
        assert waited_s > 0.1
        assert pause_of(watched, "executor") == pytest.approx(waited_s, abs=0.1)


@scenario
async def test_a_pause_lasts_until_the_last_of_its_requests_ended_otherwise():
    """None survived, so nothing recovered."""
    async with watching(ADDRESS) as (deployment, rig, watched):
        requests = [make_request(4, 50), make_request(4, 50)]
        rig.submit(*requests)
        await asyncio.sleep(0.01)
        deployment.network.stop(ADDRESS)
        for request in requests:
            await asyncio.sleep(10)
            assert pause_of(watched, "executor") is None
            rig.runtime.feed(Cancel(request.key))
        assert pause_of(watched, "executor") == pytest.approx(20, abs=0.1)
        assert watched.look()["recoveries_total"] == {}


@scenario
async def test_a_process_that_comes_back_with_its_rows_was_no_lost_executor():
    """However long it was away: requests go on where they were."""
    async with watching(ADDRESS) as (deployment, rig, watched):
        rig.submit(make_request(4, 50))
        await asyncio.sleep(0.01)
        deployment[ADDRESS].break_stream()
        assert pause_of(watched, "stream") is None
        await rig.until_idle()
        assert watched.look()["recoveries_total"] == {("stream",): 1}
        assert 0 < pause_of(watched, "stream") < 2


@scenario
async def test_a_successor_counts_that_it_took_over():
    async with Deployment(ADDRESS, "executor:2") as deployment:
        async with deployment.rig() as before:
            await before.until_ready(2)
            before.submit(*(make_request(4, 200, is_resumable=True) for _ in range(4)))
            await asyncio.sleep(0.05)
            assert all(before.runtime.views.executor(each).ledger.rows.num_running for each in (ADDRESS, "executor:2"))
        async with deployment.rig(scheduler_id="scheduler-b") as rig:
            watched = Watched(rig)
            await rig.until_ready(2)
            assert watched.look()["recoveries_total"] == {("scheduler",): 1}
            await rig.until_idle()
            pause = watched.look()["recovery_pause_seconds"]["scheduler",]
    assert sum(pause.counts) == 1
    assert 0 < pause.total < 60


def at_once(work):
    work()


def attached(meter, model="m"):
    """An observer that knows of one executor."""
    observer = ServingObserver(meter, at_once)
    description = type("Description", (), {"address": ADDRESS, "model": model, "incarnation": 1})
    snapshot = type("Snapshot", (), {"rows": ()})
    observer.saw(ExecutorAttached(description, snapshot), 0.0, Effects((), (), None))
    return observer


def a_step(intervals_s, num_tokens):
    """The outputs of a step as the core tells them."""
    count = len(intervals_s)
    return TokenOutputs(
        handles=tuple(range(count)),
        offsets=np.zeros(count, dtype=np.int32),
        num_tokens=np.array(num_tokens, dtype=np.int32),
        token_ids=np.zeros(sum(num_tokens), dtype=np.int32),
        attempts=np.ones(count, dtype=np.int32),
        rolling_hashes=np.zeros(count, dtype=np.uint64),
        intervals_s=np.array(intervals_s, dtype=np.float64),
    )


@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(float("nan")), st.floats(0, 3), st.sampled_from(BETWEEN_TOKENS_BOUNDS_S)),
            st.integers(0, 3),
        ),
        max_size=20,
    )
)
def test_columns_of_times_are_counted_like_one_after_another(rows):
    meter = Meter(COUNTED)
    observer = attached(meter)
    tokens = a_step([interval_s for interval_s, _ in rows], [number for _, number in rows])
    step = type("Step", (), {"num_tokens": 1, "num_preempted": 0})
    result = type("Result", (), {"timings": StepTimings()})
    observer.saw(StepFinished(ADDRESS, result), 1.0, Effects(step, (), None, (tokens,)))
    expected = [0] * (len(BETWEEN_TOKENS_BOUNDS_S) + 1)
    for interval_s, number in rows:
        if number and interval_s == interval_s:
            expected[bisect_left(BETWEEN_TOKENS_BOUNDS_S, interval_s / number)] += number
    meter.settle()
    histogram = meter.histogram("inter_token_latency_seconds", "m")
    assert histogram.counts == expected
    assert histogram.total == pytest.approx(sum(s for s, number in rows if number and s == s))


def ended(request, reason=FinishReason.STOP, **changes):
    """A request that took 4 s."""
    times = PhaseTimes(0.5, 0.25, 3.0, 0.25)
    return EndedRequest(request, reason, 7, 2, 1, times, 1.0, ADDRESS, False)._replace(**changes)


def test_tenants_beyond_a_number_are_others():
    meter = Meter(COUNTED)
    observer = ServingObserver(meter, at_once)
    for number in range(3 * MAX_TENANTS):
        event = Effects(None, (), None, ended=(ended(make_request(tenant=f"t{number}")),))
        observer.saw(Tick(), 0.0, event)
    (counts,) = (reading.values for reading in meter.read() if reading.definition.name == "tenant_requests_total")
    assert len(counts) == MAX_TENANTS + 1
    assert counts[OTHER_TENANTS,] == 2 * MAX_TENANTS


def test_a_request_that_failed_has_no_part_in_latencies():
    meter = Meter(COUNTED)
    observer = ServingObserver(meter, at_once)
    both = (
        ended(make_request(), FinishReason.CANCELLED),
        ended(make_request(), FinishReason.ERROR),
        ended(make_request(), FinishReason.ERROR, is_abandoned=True),
    )
    observer.saw(Tick(), 0.0, Effects(None, (), None, ended=both))
    assert sum(meter.histogram("e2e_request_latency_seconds", "simulated").counts) == 0
    for reason in ("cancelled", "error", "abandoned"):
        assert meter.count("request_success_total", "simulated", reason) == 1


def lines_of(share, *requests):
    """The lines of a log that sees these requests end."""
    log = RequestLog(share)
    with capture_logs() as lines:
        log.saw(Tick(), 0.0, Effects(None, (), None, ended=tuple(map(ended, requests))))
    return lines


def test_a_finished_request_has_one_line_that_says_all():
    request = make_request(5, request_id="r", tenant="t")
    (line,) = lines_of(1.0, replace(request, trace_parent=TRACE_PARENT))
    names = {"event": "request_finished", "request_id": "r", "index": 0, "tenant": "t", "model": "simulated"}
    tokens = {"num_prompt_tokens": 5, "num_cached_tokens": 2, "num_output_tokens": 7, "num_preemptions": 1}
    times = {"queued_s": 0.5, "ttft_s": 1.0, "tpot_s": 0.5, "e2e_s": 4.0}
    end = {"reason": "stop", "executor": ADDRESS, "trace_id": TRACE_ID, "log_level": "info"}
    assert line == names | tokens | times | end
    assert "trace_id" not in lines_of(1.0, request)[0]


def test_the_sample_goes_by_the_id():
    requests = [make_request(request_id=f"r-{number}") for number in range(1000)]
    ids = [line["request_id"] for line in lines_of(0.1, *requests)]
    assert 50 < len(ids) < 200
    assert ids == [line["request_id"] for line in lines_of(0.1, *reversed(requests))][::-1]
    chosen = replace(make_request(), key=RecordId("", ids[0], 3))
    assert [line["index"] for line in lines_of(0.1, chosen)] == [3]
    assert lines_of(0.0, *requests) == []


def test_a_refused_request_has_a_line_with_the_reason():
    log = RequestLog(1.0)
    with capture_logs() as lines:
        log.refused(RecordId("t", "r\udc80"), "m", TRACE_PARENT, InvalidRequestError("text", "is too long"))
        log.refused(RecordId("t", "r"), "m", "no trace", InvalidRequestError("text", "is too long"))
    names = {"event": "request_refused", "tenant": "t", "model": "m", "reason": "INVALID_FIELD", "log_level": "info"}
    assert lines == [{**names, "request_id": "r\udc80", "trace_id": TRACE_ID}, {**names, "request_id": "r"}]


@scenario
async def test_the_statistics_say_how_much_was_done():
    async with watching(ADDRESS) as (_, rig, watched):
        statistics = Statistics(watched.meter, rig.executors, lambda: 0, now)
        telling = asyncio.create_task(statistics.run(10.0))
        with capture_logs() as lines:
            rig.submit(make_request(5, 20), make_request(5, 30))
            await asyncio.sleep(25.0)
        telling.cancel()
        await asyncio.wait_for(statistics.run(0.0), 5)  # a period of 0 silences it
    (line,) = [line for line in lines if line["event"] == "statistics"]
    assert line["generation_tokens_per_s"] == pytest.approx(5.0, abs=0.1)
    assert line["prompt_tokens_per_s"] == pytest.approx(1.0, abs=0.1)
    assert line["num_running_requests"] == 0


@scenario
async def test_the_statistics_go_on_while_requests_run_and_nothing_comes():
    async with watching(ADDRESS) as (_, rig, watched):
        statistics = Statistics(watched.meter, rig.executors, lambda: 0, now)
        rig.submit(make_request(5, 200))
        await rig.until(lambda: rig.runtime.views.counts(ADDRESS).num_filled_slots > 0)
        with capture_logs() as lines:
            statistics.tell()
            statistics.tell()
    assert [line["num_running_requests"] for line in lines if line["event"] == "statistics"] == [1, 1]
    assert lines[-1]["generation_tokens_per_s"] == 0


@scenario
async def test_idle_time_goes_on_between_steps():
    async with watching(ADDRESS) as (_, rig, watched):
        rig.submit(make_request(5, 20))
        await rig.until_idle()
        shown = [watched.look()["step_idle_seconds_total"][ADDRESS,]]
        await asyncio.sleep(6.0)
        shown += [watched.look()["step_idle_seconds_total"][ADDRESS,]]
        rig.submit(make_request(5, 20))
        while any(rig.runtime.views.with_listener()):
            shown += [watched.look()["step_idle_seconds_total"][ADDRESS,]]
            await asyncio.sleep(0.001)
    assert shown == sorted(shown)
    assert 5.9 <= shown[1] - shown[0] <= 6.1
    assert shown[-1] - shown[1] <= 0.1


@scenario
async def test_an_executor_that_is_away_is_not_idle_and_one_that_is_back_is():
    for restarts in (True, False):
        async with Deployment(ADDRESS) as deployment, deployment.rig() as rig:
            watched, shown = Watched(rig), []

            async def pass_by(seconds, watched=watched, shown=shown):
                await asyncio.sleep(seconds)
                shown.append(watched.look()["step_idle_seconds_total"][ADDRESS,])

            await rig.until_ready()
            await pass_by(5.0)
            if restarts:
                deployment.network.stop(ADDRESS)
                await pass_by(120.0)
                deployment.network.start(ADDRESS)
            else:
                deployment[ADDRESS].break_stream()
                await pass_by(0.0)
            await rig.until_ready()
            await pass_by(0.0)
            await pass_by(7.0)
            rig.submit(make_request(5, 20))
            await rig.until_idle()
            await pass_by(0.0)
        assert shown == sorted(shown)
        assert shown[0] == pytest.approx(5.0, abs=0.5)
        assert shown[2] - shown[0] <= 3.0
        assert shown[3] - shown[2] == pytest.approx(7.0, abs=0.1)
        # Here executors that come back tell in their first step of all time since they began.
        assert restarts or shown[4] - shown[3] <= 1.0


def test_only_another_schedulers_requests_are_a_recovery_of_a_scheduler():
    recoveries = Recoveries(Meter(COUNTED))

    def attach(incarnation, *rows, address=ADDRESS):
        description = SimpleNamespace(address=address, incarnation=incarnation)
        snapshot = SimpleNamespace(rows=[SimpleNamespace(request=row) for row in rows])
        recoveries.saw(ExecutorAttached(description, snapshot), 1.0, Effects((), (), None))

    attach(1)
    recoveries.saw(ExecutorRemoved(ADDRESS), 2.0, Effects(None, (), None))
    attach(1, "a request")
    assert recoveries.successor_of is None
    attach(7, "a request", address="executor:2")
    assert recoveries.successor_of == "executor:2"
    attach(8, address="executor:2")
    assert recoveries.successor_of is None


@scenario
async def test_every_end_is_told_once():
    """By the device, by the edge, by a cancel; and what never ended is not."""
    async with watching(ADDRESS) as (_, rig, watched):
        requests = [make_request(4, 100) for _ in range(4)]
        rig.submit(make_request(4, 3), *requests)
        await asyncio.sleep(0.05)
        rig.runtime.feed(EndCompletion(requests[0].handle, 1, FinishReason.STOP))
        rig.runtime.feed(EndCompletion(requests[0].handle, 1, FinishReason.STOP))
        rig.runtime.feed(Cancel(requests[1].key))
        rig.client.close(requests[0].handle)
        await asyncio.sleep(0.05)
        counts = {labels[1]: count for labels, count in watched.look()["request_success_total"].items()}
    assert counts["stop"] == 1
    assert counts["cancelled"] == 1
    assert sum(counts.values()) == len(rig.client.finishes) + 1, "the edge's own end has no finish here"


# Of vLLM's engine metrics, without its prefix: what means the same here.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "cache_config_info",
    "request_time_per_output_token_seconds",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
}
VLLM_BOUNDS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000",
    "step_tokens": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",  # iteration_tokens_total there
}


def test_dashboards_of_vllm_need_another_prefix_and_one_other_name():
    definitions = {definition.name: definition for definition in (*READ, *COUNTED)}
    assert definitions.keys() >= VLLM_NAMES
    for name, bounds in VLLM_BOUNDS.items():
        assert set(definitions[name].bounds) >= set(map(float, bounds.split())), name


def test_names_are_what_prometheus_takes():
    for definition in (*READ, *COUNTED):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", definition.name)
        assert definition.name.endswith("_total") is (definition.kind.value == "counter")
        assert list(definition.bounds) == sorted(set(definition.bounds))
