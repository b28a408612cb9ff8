"""Spans against what the core itself says of each request, and what of the environment asks for them."""

import asyncio
import contextlib
import io
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision

from both_sides.deployment import Deployment, scenario
from paceline.process.trace_ids import SpanContext, read_trace_parent, trace_fields, write_trace_parent
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.call_spans import CallSpans
from paceline_scheduler.api.request_spans import RequestSpans
from paceline_scheduler.config import Traces, wanted_traces
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import DeadlineExceededError
from paceline_scheduler.observers import traces
from paceline_scheduler.observers.traces import TraceObserver
from paceline_scheduler.spans import names
from paceline_scheduler.spans.sampler import TraceSampler, trace_sampler
from paceline_scheduler.spans.values import Span
from paceline_scheduler.telemetry.tracing import LateSpans
from scheduler_rig.requests import make_request

ADDRESS = "executor:1"
ROOT_SAMPLERS = ("always_on", "always_off", "traceidratio")
SAMPLED = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)


class SpanList:
    """A SpanSink that keeps them."""

    def __init__(self):
        self.spans = []
        self._num_ids = 0

    def begin(self, parent):
        """Sampled as the caller is; the first of a trace is."""
        return self.below(parent) if parent is None or parent.is_sampled else parent

    def below(self, parent):
        self._num_ids += 1
        return SpanContext(self._num_ids if parent is None else parent.trace_id, self._num_ids, True)

    def put(self, span):
        self.spans.append(span)

    def of(self, parent, *span_names):
        return [span for span in self.spans if span.parent == parent and span.name in span_names]


class EndedRequests:
    """An Observer: what the core says of each request that is over, by its key."""

    def __init__(self):
        self.by_key = {}

    def saw(self, event, now, effects):
        self.by_key.update((ended.request.key, ended) for ended in effects.ended)


def followed(number, *args, **kwargs):
    """A request with a span of its own; returns both."""
    parent = SAMPLED._replace(span_id=number + 1)
    return replace(make_request(*args, **kwargs), trace_parent=write_trace_parent(parent)), parent


@scenario
async def test_the_phases_of_a_request_last_as_long_as_its_core_says():
    """With preemptions for want of blocks, a broken stream, and others beside it that nobody follows."""
    async with Deployment(ADDRESS, num_blocks=14) as deployment, deployment.rig() as rig:
        sink, ended = SpanList(), EndedRequests()
        observer = TraceObserver(rig.runtime.views, sink)
        rig.runtime.show_plans(observer)
        rig.runtime.show(ended)
        await rig.until_ready()
        lengths = rig.runtime.views.executor(ADDRESS).output_lengths
        lengths.mean = lengths.deviation = 1.0
        pairs = [followed(number, [20 + number, *range(5, 13)], 24) for number in range(6)]
        rig.submit(*(request for request, _ in pairs), make_request(7, 20))
        await asyncio.sleep(0.02)
        deployment[ADDRESS].break_stream()
        await rig.until_idle()

    num_preempted = 0
    for request, parent in pairs:
        told, seconds = ended.by_key[request.key], defaultdict(float)
        for span in sink.of(parent, names.QUEUE, names.PREEMPTED, names.DECODE):
            seconds[span.name] += span.end_s - span.start_s
        expected = told.times.queued_s, told.times.preempted_s, told.times.decode_s
        assert [seconds[name] for name in (names.QUEUE, names.PREEMPTED, names.DECODE)] == pytest.approx(expected)
        num_preempted += len(sink.of(parent, names.PREEMPTED))
        assert sum(span.attributes[names.NUM_TOKENS] for span in sink.of(parent, names.PREFILL)) >= 9
    assert num_preempted
    assert {span.parent for span in sink.spans if span.name == names.QUEUE} == {parent for _, parent in pairs}
    assert not observer._followed
    assert not any(executor.rows or executor.prefilling for executor in observer._executors.values())


@scenario
async def test_links_and_chunks_are_bounded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "MAX_CHUNKS", 3)
        patch.setattr(traces, "MAX_LINKS", 2)
        patch.setattr(traces, "DECODE_STEP_EVERY_S", 0.0)
        limits = CoreLimits(max_num_batched_tokens=16)
        async with Deployment(ADDRESS) as deployment, deployment.rig(limits=limits) as rig:
            sink = SpanList()
            rig.runtime.show_plans(TraceObserver(rig.runtime.views, sink))
            await rig.until_ready()
            request, parent = followed(1, 90, 40)
            rig.submit(request)
            await rig.until_idle()
    chunks = sink.of(parent, names.PREFILL)
    assert len(chunks) == 3
    assert [chunk.attributes[names.TOKENS_END] for chunk in chunks][-1] == 90
    assert sum(chunk.attributes[names.NUM_TOKENS] for chunk in chunks) == 90
    (decode,) = sink.of(parent, names.DECODE)
    steps = {span.context for span in sink.spans if span.name == names.STEP}
    assert len(set(decode.links)) == 2
    assert decode.links[0] == chunks[-1].links[0]  # which brought its first token
    assert sum(span.name == names.STEP_PLAN for span in sink.spans) == 1 < len(steps)  # within a second
    assert {*decode.links, *(link for chunk in chunks for link in chunk.links)} <= steps


@scenario
async def test_a_request_that_is_not_sampled_costs_no_span():
    async with Deployment(ADDRESS) as deployment, deployment.rig() as rig:
        sink = SpanList()
        rig.runtime.show_plans(TraceObserver(rig.runtime.views, sink))
        await rig.until_ready()
        for trace_parent in ("", "no trace", write_trace_parent(SAMPLED._replace(is_sampled=False))):
            rig.submit(replace(make_request(5, 20), trace_parent=trace_parent))
        await rig.until_idle()
    assert not sink.spans


def called(trace_parent, error=None):
    """The spans of a call with one answer."""
    sink, calls = SpanList(), CallSpans()
    calls.show(sink, iter((1.0, 3.0)).__next__)
    with contextlib.suppress(DeadlineExceededError), calls.of("/Tokenize", (("traceparent", trace_parent),)):
        if error is not None:
            raise error
    return sink.spans


def test_a_call_of_somebody_who_is_traced_is_below_his_span():
    (span,) = called(write_trace_parent(SAMPLED), DeadlineExceededError("too late"))
    assert (span.name, span.parent, span.start_s, span.end_s) == ("Tokenize", SAMPLED, 1.0, 3.0)
    assert span.error == span.attributes[names.ERROR_TYPE] == DeadlineExceededError.reason
    assert not called(write_trace_parent(SAMPLED))[0].error
    assert not called("")
    assert not called(write_trace_parent(SAMPLED._replace(is_sampled=False)))


def test_spans_that_were_made_before_opentelemetry_was_there_are_sent_then(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    spans = LateSpans(TraceSampler(), lambda: 1.0, "scheduler-1")
    spans.put(Span("call", spans.begin(SAMPLED), SAMPLED, 1.0, 2.0))
    spans.load()
    assert spans.counts()["made"] == 1
    spans.close(60.0)  # whoever is still at it complains in the middle of another test
    assert spans.counts()["failed"] == 1


PARENTS = st.one_of(st.none(), st.booleans().map(lambda is_sampled: SAMPLED._replace(is_sampled=is_sampled)))


@given(
    name=st.sampled_from(["", "x", *(f"{by}{root}" for by in ("", "parentbased_") for root in ROOT_SAMPLERS)]),
    ratio=st.one_of(st.floats(0, 1).map(str), st.sampled_from(["", "0", "1", "0.1", "2", "-1", "nan", "x"])),
    trace_id=st.integers(1, 2**128 - 1),
    parent=PARENTS,
)
def test_the_sampler_decides_as_opentelemetrys_does(name, ratio, trace_id, parent):
    environ = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": ratio}
    context = None
    if parent is not None:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else 0)
        remote = trace.SpanContext(trace_id, parent.span_id, is_remote=True, trace_flags=flags)
        context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        for variable, value in environ.items():
            patch.setenv(variable, value)
        sampler = TracerProvider(shutdown_on_exit=False).sampler
    expected = sampler.should_sample(context, trace_id, "call").decision is Decision.RECORD_AND_SAMPLE
    assert trace_sampler(environ).takes(trace_id, parent) == expected


def begun(known="", **fields):
    """The only span of a request that ends at once; None for none. With the request as it goes on."""
    sink, request = SpanList(), GenerateRequest(request_id="r", **fields)
    spans = RequestSpans(sink, lambda: 2.0, lambda _: known)
    spans.begin(request, None, 1.0).end(DeadlineExceededError("too late"))
    return (sink.spans or [None])[0], request


def test_a_client_that_comes_back_has_a_span_below_its_callers_that_names_the_one_before():
    before = SAMPLED._replace(span_id=7)
    span, request = begun(write_trace_parent(before), trace_parent=write_trace_parent(SAMPLED), attachment=2)
    assert (span.parent, span.links, span.error) == (SAMPLED, (before,), "DEADLINE_EXCEEDED")
    assert request.trace_parent == write_trace_parent(span.context)
    span, _ = begun(write_trace_parent(before), attachment=2)
    assert (span.parent, span.links) == (before, ())
    unsampled = write_trace_parent(SAMPLED._replace(is_sampled=False))
    assert begun(trace_parent=unsampled) == (None, GenerateRequest(request_id="r", trace_parent=unsampled))


def test_the_span_of_a_call_says_what_was_asked_for():
    span, _ = begun(sampling={"temperature": 0.5, "seed": 2**63 - 1}, stopping={"max_tokens": 7, "stop": ["secret"]})
    asked = {name.removeprefix("gen_ai.request."): value for name, value in span.attributes.items()}
    assert (asked["temperature"], asked["seed"], asked["max_tokens"]) == (0.5, 2**63 - 1, 7)
    assert "secret" not in str(span.attributes)
    span, _ = begun(sampling={"seed": 2**63})
    assert "gen_ai.request.seed" not in span.attributes


def test_a_wrong_traceparent_begins_a_trace_and_one_that_is_too_long_is_left_to_be_refused():
    """As the W3C Trace Context says, and as the field's own bound does."""
    span, request = begun(trace_parent="wrong")
    assert span.parent is None
    assert request.trace_parent == write_trace_parent(span.context)
    assert begun(trace_parent="x" * 129)[0] is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_traceparent_is_read_as_it_was_written(trace_id, span_id, is_sampled):
    context = SpanContext(trace_id, span_id, is_sampled)
    written = write_trace_parent(context)
    assert read_trace_parent(written) == context
    assert trace_fields(written) == {"trace_id": written.split("-")[1]}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (write_trace_parent(SAMPLED), True),
        ("cc" + write_trace_parent(SAMPLED)[2:] + "-what-comes-later", True),
        (write_trace_parent(SAMPLED) + "-more", False),
        ("ff" + write_trace_parent(SAMPLED)[2:], False),
        (write_trace_parent(SAMPLED).upper(), False),
        (write_trace_parent(SAMPLED._replace(trace_id=0)), False),
        (write_trace_parent(SAMPLED._replace(span_id=0)), False),
        ("00-1-2-01", False),
        ("", False),
    ],
)
def test_what_is_a_traceparent(text, is_one):
    """As the W3C Trace Context says, of versions to come too."""
    assert (read_trace_parent(text) is not None) == is_one


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, Traces.OFF),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, Traces.OFF),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, Traces.OTLP),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, Traces.OTLP),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, Traces.OTLP),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, Traces.OFF),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, Traces.OFF),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, Traces.UNSUPPORTED),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, Traces.UNSUPPORTED),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, Traces.OTLP),
    ],
)
def test_which_variables_ask_for_traces(environ, wanted):
    """None, unless one names where they go; what the SDK reads of the others is its own."""
    assert wanted_traces(environ) is wanted
