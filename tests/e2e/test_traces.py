"""Traces in a real OTLP receiver: of processes, as `OTEL_*` variables configure them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider

from executor_rig.hash_executor import simulated_executor
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_client import AsyncClient, Client, Stopping
from service_processes.logged import SchedulerTestProcess

MAX_WAIT_S = 60
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_PARENT = f"00-{TRACE_ID}-{CALLER_ID}-01"
PROMPT, MAX_TOKENS = tuple(range(1, 40)), 120
EXPECTED = continuation(PROMPT, MAX_TOKENS, PRINTABLE, seed=7)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver: keeps the spans, each with the `service.instance.id` of who sent it."""

    def __init__(self):
        self.spans = []  # (instance, span)
        self.news = asyncio.Event()

    async def Export(self, request, context):  # noqa: N802 - the name of the call
        for resource_spans in request.resource_spans:
            instance = attributes(resource_spans.resource)["service.instance.id"]
            self.spans += [(instance, span) for scope in resource_spans.scope_spans for span in scope.spans]
        self.news.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, is_there):
        """Wait until these are among the spans; returns all of them."""
        async with asyncio.timeout(MAX_WAIT_S):
            while not is_there(self.spans):
                self.news.clear()
                await self.news.wait()
        return self.spans


def attributes(element):
    """The attributes of a span or resource, as Python's values."""
    found = {}
    for each in element.attributes:
        value = getattr(each.value, each.value.WhichOneof("value"))
        found[each.key] = [item.string_value for item in value.values] if hasattr(value, "values") else value
    return found


def named(spans, *names):
    return [span for _, span in spans if span.name in names]


def calls(spans):
    return [(instance, span) for instance, span in spans if span.kind == span.SPAN_KIND_SERVER]


@pytest.fixture
async def receiver(monkeypatch):
    """A receiver to which processes that start from now on send what they have at once."""
    receiver, server = Receiver(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield receiver
    await server.stop(None)


@contextlib.asynccontextmanager
async def scheduler(executor, *options):
    """Run a scheduler until the block ends; yields it and where it serves."""
    process = await SchedulerTestProcess.start("--executors", executor.address, *options)
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            ready = await process.event("ready")
        yield process, f"127.0.0.1:{ready['port']}"
    finally:
        await process.stop()


async def generate(target, attachment=1, received=(), metadata=()):
    """Run the request by Generate, or come back to it with what was received; yields tokens."""
    request = pb.GenerateRequest(request_id="r", resumable=True, attachment=attachment)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.seed, request.stopping.max_tokens = 7, MAX_TOKENS
    request.resume_from = len(received)
    request.prior_output_token_ids.extend(received)
    async with grpc.aio.insecure_channel(target) as channel:
        async for response in InferenceServiceStub(channel).Generate(request, metadata=metadata):
            for token_id in response.delta.token_ids:
                yield token_id


async def test_the_spans_of_a_request_are_a_tree_below_its_callers_span(receiver):
    options = ("--max-num-batched-tokens", "16")
    async with simulated_executor() as executor, scheduler(executor, *options) as (_, target):
        metadata = (("traceparent", TRACE_PARENT), ("tracestate", "vendor=1"))
        assert [token async for token in generate(target, metadata=metadata)] == list(EXPECTED)
        spans = await receiver.until(lambda spans: calls(spans) and named(spans, "decode") and named(spans, "step"))

    ((_, call),) = calls(spans)
    assert (call.trace_id.hex(), call.parent_span_id.hex(), call.trace_state) == (TRACE_ID, CALLER_ID, "vendor=1")
    assert call.name == "text_completion simulated"
    of_trace = [span for _, span in spans if span.trace_id == call.trace_id and span is not call]
    names = Counter(span.name for span in of_trace)
    assert names == {"prepare": 1, "queue": 1, "prefill": 3, "decode": 1, "detokenise": 1}
    for span in of_trace:
        assert span.parent_span_id == call.span_id
        assert call.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= call.end_time_unix_nano
    (prepare,), (queue,), chunks, (decode,) = (named(spans, name) for name in ("prepare", "queue", "prefill", "decode"))
    assert prepare.end_time_unix_nano <= queue.start_time_unix_nano
    for before, after in pairwise((queue, *chunks, decode)):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert [attributes(chunk)["paceline.tokens_end"] for chunk in chunks] == [16, 32, len(PROMPT)]
    told = attributes(call)
    assert told["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.request.max_tokens"] == MAX_TOKENS
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    seconds = (call.end_time_unix_nano - call.start_time_unix_nano) / 1e9
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < seconds
    steps = {span.span_id: span for span in named(spans, "step")}
    for chunk in chunks:
        step = steps[chunk.links[0].span_id]
        assert not step.parent_span_id
        assert attributes(step)["paceline.forward_seconds"] > 0
    assert {"plan", "forward"} <= {span.name for _, span in spans if span.parent_span_id in steps}


async def test_a_request_has_one_trace_over_the_death_of_its_scheduler(receiver):
    """Its client says nothing of a trace: the executor has kept it. The successor's span is below the one that died."""
    async with (
        simulated_executor(step_ms=20) as executor,
        scheduler(executor, "--standby") as (active, target),
        scheduler(executor, "--standby") as (standby, other),
    ):
        stream = generate(target)
        received = [await anext(stream)]
        await receiver.until(lambda spans: named(spans, "prefill"))
        active.signal(signal.SIGKILL)
        with contextlib.suppress(grpc.aio.AioRpcError):
            received.extend([token async for token in stream])
        async with asyncio.timeout(MAX_WAIT_S):
            await standby.event("ready", lambda event: "models" in event)
        received += [token async for token in generate(other, attachment=2, received=received)]
        spans = await receiver.until(calls)
        instances = [(await each.event("listening"))["scheduler_id"] for each in (active, standby)]

    assert received == list(EXPECTED)
    ((successor, call),) = calls(spans)
    (queue,) = named(spans, "queue")
    assert successor == instances[1]
    trace_ids = {(instance, span.trace_id) for instance, span in spans if span.name in ("queue", "decode")}
    assert trace_ids == {(instance, call.trace_id) for instance in instances}
    assert call.parent_span_id == queue.parent_span_id, "of the span that died with the first scheduler"
    assert attributes(call)["paceline.attachment"] == 2
    assert call.span_id in {span.parent_span_id for span in named(spans, "decode")}


async def test_the_client_library_hands_on_its_callers_span(receiver):
    prompt, tracer = {"token_ids": PROMPT, "stopping": Stopping(max_tokens=3)}, TracerProvider().get_tracer("caller")

    def generate_and_wait():
        with Client(target) as client:
            client.generate(**prompt)

    async with simulated_executor() as executor, scheduler(executor) as (_, target), AsyncClient(target) as client:
        with tracer.start_as_current_span("first") as first:
            await client.generate(**prompt)
        with tracer.start_as_current_span("second") as second:
            await asyncio.to_thread(generate_and_wait)
        await client.generate(**prompt)
        spans = await receiver.until(lambda spans: len(calls(spans)) == 3)
    callers = [span.get_span_context() for span in (first, second)]
    expected = {(caller.trace_id.to_bytes(16, "big"), caller.span_id.to_bytes(8, "big")) for caller in callers}
    assert {(span.trace_id, span.parent_span_id) for _, span in calls(spans) if span.parent_span_id} == expected


async def test_a_ratio_of_0_sends_nothing_but_what_callers_have_sampled(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with simulated_executor() as executor, scheduler(executor) as (_, target):
        assert [token async for token in generate(target)] == list(EXPECTED)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(generate(target, received=[10**6], metadata=(("traceparent", TRACE_PARENT),)))
        async with grpc.aio.insecure_channel(target) as channel:
            for metadata in ((), (("traceparent", TRACE_PARENT),)):
                await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
        spans = await receiver.until(lambda spans: len(calls(spans)) == 2)
    assert {span.trace_id.hex() for _, span in spans} == {TRACE_ID}
    (listing,) = named(spans, "paceline.v1.InferenceService/ListModels")
    assert listing.parent_span_id.hex() == CALLER_ID
    (call,) = (span for _, span in calls(spans) if span is not listing)
    assert (call.status.code, attributes(call)["error.type"]) == (call.status.STATUS_CODE_ERROR, "INVALID_FIELD")


@pytest.mark.parametrize("is_listening", [True, False])
async def test_a_receiver_that_refuses_or_hangs_disturbs_nobody(monkeypatch, is_listening):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        if is_listening:
            deaf.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
        async with simulated_executor() as executor, scheduler(executor) as (process, target):
            for _ in range(3):
                assert [token async for token in generate(target)] == list(EXPECTED)
            if not is_listening:
                async with asyncio.timeout(MAX_WAIT_S):
                    await process.event("traces_failing", lambda event: "UNAVAILABLE" in event["error"])
            process.signal(signal.SIGTERM)
            async with asyncio.timeout(MAX_WAIT_S):
                assert await process.ended() == (0, "")


def test_a_scheduler_imports_nothing_unasked_and_starts_without_what_it_cannot_have():
    program = """
import sys
from types import SimpleNamespace
from paceline_scheduler import config, process
from paceline_scheduler.telemetry import tracing
def started(**environ):
    settings = SimpleNamespace(traces=config.wanted_traces(environ))
    assert tracing.trace(settings, None, None, None, None, "") is None
def loaded():
    spans = tracing.LateSpans(tracing.TraceSampler(), None, "")
    spans.load()
    assert not spans.begin(None).is_sampled
started(OTEL_SERVICE_NAME="mine")
print([name for name in sys.modules if name.startswith("opentelemetry")])
asking = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}
started(**asking, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
sys.modules["opentelemetry"] = None
loaded()
del sys.modules["opentelemetry"]
loaded()
"""
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}
    run = subprocess.run((sys.executable, "-c", program), env=environ, capture_output=True, text=True, check=True)
    imported, *lines = run.stdout.splitlines()
    assert imported == "[]"
    install = "pip install ./protos ./clients '.[tracing]'"
    complaints = "traces go by OTLP over gRPC", install, "cannot use its OTEL_* variables"
    assert len(lines) == len(complaints)
    for line, complaint in zip(lines, complaints, strict=True):
        assert "traces_off" in line
        assert complaint in line
