"""A peer that lies costs itself and nobody else: honest requests keep their tokens, the log stays short, memory too.

Real sockets, an honest executor, and a rogue that says everything which is beyond a bound, and what is within all
bounds but cannot be.
"""

import asyncio
import collections
import contextlib
import json
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import grpc
import numpy as np
import pytest
import structlog
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from edge_rig.tokenizers import (
    byte_level_tokenizer,
    sentence_piece_tokenizer,
    served_model,
    tokenizer_source,
)
from executor_rig.hash_executor import HASH_LIMITS, hash_executor, loaded
from executor_rig.hash_runner import HashRunner, continuation
from executor_rig.plan_client import attached, hello
from paceline.process.log_bounds import BURST, MAX_LINE_BYTES
from paceline.process.logs import set_up_logs
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2
from paceline_executor.link.tokenizer import tokenizer_digest
from paceline_scheduler.api import wire as api_wire
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text import tokenizer
from paceline_scheduler.api.text.confined import Confinement
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import InvalidRequestError, QueueFullError, UnsupportedError
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.link.transport_grpc import GrpcTransport
from rogues.lies import name_of, paths, values_beyond, with_value
from rogues.rogue_executor import NUM_ADDRESSES, Script, rogue_executor, welcome
from scheduler_rig.requests import make_request
from scheduler_rig.rig import SchedulerRig

GENEROUS_S = 60.0
MAX_GROWTH_BYTES = 384 * 1024 * 1024
LAST = plan_pb2.AttachResponse(snapshot=plan_pb2.SnapshotPart(last=True, num_parts=1))


def response(**member):
    return plan_pb2.AttachResponse(**member)


def column(*values):
    return np.array(values, dtype="<i4").tobytes()


def welcomed(*messages, **options):
    """An executor that accepts, then says this."""
    return (response(welcome=welcome(**options)), LAST, *messages)


def lies_beyond_bounds():
    """For every field that a scheduler reads, on the stream or in GetInfo, what is just beyond."""
    for path in paths(plan_pb2.AttachResponse.DESCRIPTOR):
        values = values_beyond(path[-1]) if path[0].name != "results" else []
        for number, value in enumerate(values[:1]):
            lie = with_value(path, value)
            if len(lie.SerializeToString()) > 4_000_000:
                continue  # gRPC's own bound, of messages that come to a test
            before = {"welcome": (), "waiting": (), "snapshot": welcomed()[:1]}.get(path[0].name, welcomed())
            yield Script(f"{name_of(path)} {number}", (*before, lie))
    for path in paths(executor_pb2.GetInfoResponse.DESCRIPTOR):
        for number, value in enumerate(values_beyond(path[-1])[:1]):
            yield Script(f"{name_of(path)} {number}", info=with_value(path, value))


def snapshot(**fields):
    """An executor that accepts and has this row."""
    row = plan_pb2.RowState(id=plan_pb2.RecordId(request_id="r"), prompt_token_ids=column(1), **fields)
    part = plan_pb2.SnapshotPart(rows=[row], last=True, num_parts=1)
    return (response(welcome=welcome()), response(snapshot=part))


def large_welcome():
    whole = welcome()
    whole.geometry.num_blocks, whole.geometry.block_size = 1 << 22, 16
    whole.limits.max_num_rows, whole.limits.max_num_batched_tokens, whole.limits.max_model_len = (
        1 << 13,
        1 << 20,
        1 << 19,
    )
    whole.model.vocab_size = 1 << 20
    whole.step_points.add(num_tokens=1, duration_ns=1)
    return (response(welcome=whole), LAST)


def refused_welcome(**fields):
    whole = welcome()
    whole.MergeFrom(plan_pb2.Welcome(**fields))
    return (response(welcome=whole), LAST)


def lies_within_bounds():
    """What each field may hold, and what yet cannot be."""
    error = sampling_pb2.RequestError(code=13, message="\x1b[31mred\x1b[0m" + "x" * 1000)
    timings = plan_pb2.StepTimings(idle_ns=2**58)
    yield Script("a row that is not there", snapshot(row=8))
    yield Script("more computed than known", snapshot(row=0, num_computed_tokens=2))
    yield Script("a block that is not there", snapshot(row=0, block_ids=column(32)))
    yield Script("output beyond the context", snapshot(row=0, output_token_ids=bytes(4 * 64)))
    yield Script("a token that is not there", snapshot(output_token_ids=column(1000)))
    yield Script("a result of no plan", welcomed(response(result=plan_pb2.StepResult(step_id=1, timings=timings))))
    yield Script(
        "an error of no plan", welcomed(response(result=plan_pb2.StepResult(errors=[{"row": 0, "error": error}])))
    )
    yield Script("step points of nothing", refused_welcome(step_points=[plan_pb2.StepPoint()]))
    yield Script("captured steps in no order", refused_welcome(graphs={"num_tokens": [64, 32]}))
    yield Script("a name of a megabyte", refused_welcome(model=inference_pb2.Model(name="m" * 10**6)))
    yield Script("the largest executor", large_welcome())
    yield Script("rows of 2^37 tokens", refused_welcome(limits={"max_num_rows": 1 << 13, "max_model_len": 1 << 24}))
    yield Script("the honest one's name", welcomed(name="hash", digest="another"))
    waiting = response(waiting=plan_pb2.WaitingInLine(holder_scheduler_id="x", holder_term=1, holder_address="evil:1"))
    drain = response(drain=inference_pb2.Drain(reason="\x1b[31m" + "r" * 1500))
    yield Script("three thousand drains", welcomed(*[drain] * 3000))
    yield Script("three thousand times in line", (waiting,) * 3000)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def log(tmp_path):
    """The lines of the log, as they are written."""
    before, path = structlog.get_config(), tmp_path / "log"
    with path.open("wb") as file:
        writer = set_up_logs("info", file.fileno())

        def lines():
            writer.finish(GENEROUS_S)
            return path.read_bytes().splitlines()

        yield lines
        writer.close(GENEROUS_S)
    structlog.configure(**before)


def assert_short(lines, seconds):
    """No traceback, no long line, and no cause more often than it may be told."""
    events = [json.loads(line) for line in lines]
    assert [event for event in events if "exception" in event] == []
    assert max(map(len, lines)) < MAX_LINE_BYTES
    causes = collections.Counter((event["event"], event.get("address")) for event in events)
    assert max(causes.values()) <= BURST + seconds + 2


async def honest_requests(rig, until):
    """Run requests of the honest model one after another; returns how many there were. All get their tokens."""
    count = 0
    while not until():
        request = make_request(5, 40, model="hash", seed=count)
        rig.submit(request)
        await rig.until(lambda handle=request.handle: handle in rig.client.ended)
        expected = continuation(request.prompt_token_ids.tolist(), 40, HASH_LIMITS.vocab_size, seed=count)
        assert rig.client.token_ids.get(request.handle) == expected, rig.client.failures
        count += 1
    return count


async def until_driven(rig, executor):
    """Wait until the honest one is attached, and those that say nothing at all are lost."""
    await rig.until(lambda: rig.states().get(executor.address) is ShownState.READY)
    await rig.executors.until_synced(Arrival.NEW)


def operators_view(rig):
    """What ListExecutors answers: it can be written whatever an executor has told."""
    views = [api_wire.executor_view(status) for status in rig.executors.statuses()]
    assert all(view.SerializeToString() for view in views)
    return {view.address: view for view in views}


@pytest.mark.parametrize("lies", [lies_beyond_bounds, lies_within_bounds])
async def test_an_executor_that_lies_costs_itself_only(lies, log):
    scripts = list(lies())
    async with hash_executor() as honest, rogue_executor() as rogue:
        addresses = ",".join((honest.address, *rogue.addresses(NUM_ADDRESSES)))
        started_s, before = time.monotonic(), resident_bytes()
        async with SchedulerRig(addresses, GrpcTransport()) as rig:
            async with asyncio.timeout(GENEROUS_S):
                await until_driven(rig, honest)
                rogue.scripts.extend(scripts)
                count = await honest_requests(rig, lambda: len(rogue.told) == len(scripts))
                count += await honest_requests(rig, lambda: True)
            views = operators_view(rig)
        assert {script.name for script in scripts} == set(rogue.told)
        assert views[honest.address].last_error == ""
        assert count > 0
    assert_short(log(), time.monotonic() - started_s)
    assert resident_bytes() - before < MAX_GROWTH_BYTES


async def test_results_that_cannot_be_end_the_stream_of_their_executor_alone(log):

    def lie(**spoilt):
        def answer(plan):
            rows = np.frombuffer(plan.rows, "<i4").size
            ones = column(*[1] * rows)
            fields = {"rows": plan.rows, "num_accepted": ones, "token_ids": ones, "finishes": bytes(rows)} | spoilt
            yield response(
                result=plan_pb2.StepResult(
                    incarnation=plan.incarnation, epoch=plan.epoch, step_id=plan.step_id, grant_hash=1, **fields
                )
            )

        return answer

    spoilt = [
        {"token_ids": column(-1)},
        {"token_ids": column(1000)},
        {"finishes": bytes([200])},
        {"rows": column(7)},
        {},
    ]
    scripts = [Script(f"{number}", welcomed(), lie(**fields)) for number, fields in enumerate(spoilt)]
    async with hash_executor() as honest, rogue_executor() as rogue:
        started_s = time.monotonic()
        async with SchedulerRig(",".join((honest.address, *rogue.addresses(1))), GrpcTransport()) as rig:
            async with asyncio.timeout(GENEROUS_S):
                await until_driven(rig, honest)
                rogue.scripts.extend(scripts)
                await rig.until_ready(2)
                rig.submit(make_request(3, 8, model="rogue"))
                await honest_requests(rig, lambda: len(rogue.told) == len(scripts))
            operators_view(rig)
    assert_short(log(), time.monotonic() - started_s)


HONEST_DIGEST = tokenizer_digest(loaded(HashRunner(1, 1, 2)).description.tokenizer)


async def test_a_tokenizer_under_another_ones_digest_costs_its_sender_the_registration():
    """The other one has not been seen yet, and so cannot be asked."""
    async with rogue_executor() as rogue:
        (address,) = rogue.addresses(1)
        rogue.scripts.append(Script("first", (response(welcome=welcome(name="hash", digest=HONEST_DIGEST)), LAST)))
        async with SchedulerRig(address, GrpcTransport()) as rig:
            sentence = f"announced tokenizer {HONEST_DIGEST!r}"
            await rig.until(lambda: any(sentence in status.last_error for status in rig.executors.statuses()))
            assert rig.executors.models() == ()


async def test_a_tokenizer_that_breaks_whoever_reads_it_costs_its_sender_the_registration(monkeypatch):
    """Of every l a thousand, of each of these a thousand, and so on: the library ends a process that lacks memory."""
    monkeypatch.setattr(tokenizer, "_CONFINEMENT", Confinement(max_bytes=512 << 20))
    fields = json.loads(byte_level_tokenizer().to_str())
    grows = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 1000}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 5}
    sent = executor_pb2.GetTokenizerResponse(tokenizer_json=json.dumps(fields).encode(), last=True)
    texts = Texts(EdgeLimits(), datetime.now)

    async def prepare(source, vocab_size):
        if source.digest != HONEST_DIGEST:  # that model has no text
            await texts.prepare(source, vocab_size)

    async with hash_executor() as honest, rogue_executor() as rogue:
        (address,) = rogue.addresses(1)
        store = TokenizerStore(prepare)
        async with SchedulerRig(f"{honest.address},{address}", GrpcTransport(), tokenizers=store) as rig:
            await until_driven(rig, honest)
            rogue.scripts.extend([Script("welcome", welcomed(digest="bomb")), Script("bomb", tokenizer=(sent,))] * 9)
            await rig.until(lambda: "too much memory" in operators_view(rig)[address].last_error)
            assert await honest_requests(rig, iter([False, False, True]).__next__) == 2
    await texts.close()


_HOSTILE = (None, True, -1, 2**31, 2**32 - 1, 2**40, 1e308, "", "l" * 1000, "(l*)*$", "\ufffd", [], {}, [{}], 16)
_PARTS = (
    {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 1000},
    {"type": "Replace", "pattern": {"Regex": "(.|l)*$"}, "content": "ll"},
    {"type": "Prepend", "prepend": "l" * 100_000},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
)


@st.composite
def foreign_tokenizers(draw):
    """A sound one of which some values are others, or with some parts too many."""
    fields = json.loads(draw(st.sampled_from((byte_level_tokenizer, sentence_piece_tokenizer)))().to_str())
    for _ in range(draw(st.integers(0, 1))):
        place, key = fields, draw(st.sampled_from(sorted(fields)))
        while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place[key] = draw(st.sampled_from(_HOSTILE))
    parts = draw(st.one_of(st.just([]), st.lists(st.sampled_from(_PARTS), min_size=1, max_size=4)))
    if parts:
        fields["normalizer"] = {"type": "Sequence", "normalizers": parts}
    return json.dumps(fields).encode()


@pytest.mark.parametrize("count", [pytest.param(40, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.soak)])
async def test_foreign_tokenizers_cost_nobody_anything(count):
    found = []

    @settings(max_examples=count, database=None, derandomize=True, phases=[Phase.generate])
    @given(foreign_tokenizers())
    def draw(data):
        found.append(data)

    draw()
    texts, base = Texts(EdgeLimits(), datetime.now), tokenizer_source(byte_level_tokenizer())
    outcomes = collections.Counter()

    async def use(number, data):
        model = served_model(replace(base, json=data, digest=f"{number}"), max_model_len=4096)
        try:
            await texts.token_ids(inference_pb2.GenerateRequest(text="Hello, world"), model)
            outcomes["used"] += 1
        except (UnsupportedError, InvalidRequestError, QueueFullError) as error:
            outcomes[type(error).__name__] += 1

    async with hash_executor() as honest, SchedulerRig(honest.address, GrpcTransport()) as rig:
        await until_driven(rig, honest)
        for number, data in enumerate(found[:9]):
            await use(number, data)
        before = resident_bytes()
        campaign = asyncio.gather(*(use(number, data) for number, data in enumerate(found[9:], start=9)))
        assert await honest_requests(rig, campaign.done) > 0
        await campaign
    await texts.close()
    assert outcomes.total() >= count
    assert min(outcomes["used"], outcomes["UnsupportedError"]) >= count // 10
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("difference", ["tokenizer", "vocabulary"])
async def test_executors_of_one_name_and_different_models_are_not_mixed(difference):
    other = welcome(name="hash", digest=HONEST_DIGEST)
    if difference == "tokenizer":
        other.tokenizer_digest = "rogue"
    else:
        other.model.vocab_size = 999
    async with hash_executor() as honest, rogue_executor() as rogue:
        (address,) = rogue.addresses(1)
        async with SchedulerRig(f"{honest.address},{address}", GrpcTransport()) as rig:
            await rig.until_ready()
            rogue.scripts.append(Script("unlike", (response(welcome=other), LAST)))
            await rig.until(lambda: "another executor serves" in operators_view(rig)[address].last_error)
            assert await honest_requests(rig, iter([False, False, True]).__next__) == 2
            (served,) = rig.executors.models()
            assert (served.name, served.num_executors, served.vocab_size) == ("hash", 1, HASH_LIMITS.vocab_size)


async def tell(call, messages):
    for message in messages:
        await call.write(message.SerializeToString())
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_scheduler_that_lies_costs_itself_only(log):
    lies = []
    for path in paths(plan_pb2.AttachRequest.DESCRIPTOR):
        if path[0].name != "plans":
            lies += [with_value(path, value) for value in values_beyond(path[-1])[:2]]
    lies = [lie for lie in lies if len(lie.SerializeToString()) < 4_000_000]
    before = resident_bytes()
    async with hash_executor() as executor:
        async with grpc.aio.insecure_channel(executor.address) as channel:
            for number, lie in enumerate(lies):
                greeting = plan_pb2.AttachRequest(hello=hello(term=number + 1))
                call = channel.stream_stream("/paceline.v1.ExecutorService/Attach")()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    async with asyncio.timeout(GENEROUS_S):
                        await tell(call, [lie] if number % 2 or lie.HasField("hello") else [greeting, lie])
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, lie
        async with attached(executor.address, hello(term=len(lies) + 1)) as client:
            assert (await client.run()).step_id == 1
    assert len(lies) > 100
    assert log() == []
    assert resident_bytes() - before < MAX_GROWTH_BYTES
