"""Sending: how many at once, when, and what becomes of failures and interruptions. The clock is the test's own."""

import asyncio
import contextlib
import io
import math

import grpc
import pytest
from rich.console import Console

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.ladder import run_ladder
from paceline_cli.bench.live_view import NoView, ProgressBar, describe
from paceline_cli.bench.load import LoadGenerator
from paceline_cli.bench.paceline_target import PacelineTarget, prompt_token_ids
from paceline_cli.bench.prompts import PromptWriter
from paceline_cli.bench.records import Counted, Record, RequestFailure, RungRun
from paceline_cli.bench.rungs import ClosedLoop, OpenLoop, Replay, Rung
from paceline_cli.bench.targets import Served
from paceline_cli.bench.traces import Scale, TraceRow, replay
from paceline_cli.bench.workload import PlannedRequest, Segment
from paceline_client.errors import NotFoundError, OverloadedError
from paceline_client.requests import Sampling
from paceline_client.results import FinishReason, Model
from paceline_client.testing import End, Fail, FakeServer, Tokens


class VirtualTime:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.seconds = 100.0

    def now(self):
        return self.seconds

    async def sleep(self, seconds):
        """Let others do what is to be done now, then let time pass."""
        for _ in range(3):
            await asyncio.sleep(0)
        self.seconds += seconds

    @property
    def clock(self):
        return Clock(self.now, self.sleep)


class InMemoryTarget:
    """Answers the first requests with one token each, and knows how many asked at once."""

    def __init__(self, time, *, num_answers=math.inf, failing=()):
        self.served = Served("memory", 2048)
        self.num_symbols = 1000
        self.sent = []
        self.most_at_once = 0
        self.num_cancelled = 0
        self._time = time
        self._num_answers = num_answers
        self._failing = failing
        self._running = 0

    async def send(self, request, times):
        self.sent.append((self._time.now(), request))
        number = len(self.sent)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(0)
            if number > self._num_answers:
                await asyncio.Event().wait()
            if number in self._failing:
                raise OverloadedError("the queue is full")
            times.append(self._time.now())
            return Counted(len(request.symbols), 1)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._running -= 1

    async def close(self):
        """Nothing to close."""


@pytest.fixture
def time():
    return VirtualTime()


@pytest.fixture
def target(time):
    return InMemoryTarget(time)


def requests(*times, num_output_tokens=3):
    """Prompts of four tokens."""
    return [
        PlannedRequest((Segment(f"own {serial}", 4, serial),), num_output_tokens, time)
        for serial, time in enumerate(times)
    ]


def generator_of(target, clock):
    """For prompts of the first seed."""
    return LoadGenerator(target, PromptWriter(target.num_symbols, 0), clock, cache_group="run")


async def run(target, rung, clock, stop=None):
    generator = generator_of(target, clock)
    running = generator.begin(rung)
    await generator.run(running, stop or asyncio.Event())
    return running


@pytest.mark.parametrize("max_concurrency", [1, 3, 8])
async def test_a_closed_loop_keeps_so_many_running(max_concurrency, time, target):
    """Never more, and as many as there are requests to fill it."""
    ended = await run(target, Rung(ClosedLoop(max_concurrency), requests(*[None] * 20)), time.clock)
    assert (target.most_at_once, [record.outcome for record in ended.records]) == (
        max_concurrency,
        [Counted(4, 1)] * 20,
    )


async def stopped_when_sent(num_requests, target, running, stop):
    """What came of running something that was told to stop when so many requests were sent."""
    task = asyncio.create_task(running)
    while len(target.sent) < num_requests:
        await asyncio.sleep(0)
    stop.set()
    return await task


async def test_an_open_loop_sends_when_it_is_time_whether_or_not_anything_has_ended(time):
    silent, stop = InMemoryTarget(time, num_answers=0), asyncio.Event()
    running = run(silent, Rung(OpenLoop(2, 1), requests(0.5, 0.75, 4)), time.clock, stop)
    ended = await stopped_when_sent(3, silent, running, stop)
    assert [record.started for record in ended.records] == [100.5, 100.75, 104]


async def test_a_trace_is_replayed_at_its_own_times(time, target):
    rows = [TraceRow(60, 5, 1), TraceRow(62, 6, 1), TraceRow(62, 7, 1), TraceRow(70, 8, 1)]
    scale = Scale(rate=4)
    ended = await run(target, Rung(Replay("t", scale), replay(rows, scale)), time.clock)
    assert [(moment, len(request.symbols)) for moment, request in target.sent] == [
        (100, 5),
        (100.5, 6),
        (100.5, 7),
        (102.5, 8),
    ]
    assert [record.due for record in ended.records] == [100, 100.5, 100.5, 102.5]


async def test_one_that_is_sent_late_says_so(time, target):
    async def oversleep(seconds):
        await time.sleep(seconds + 0.25)

    ended = await run(target, Rung(OpenLoop(1, 1), requests(1, 1.125, 3)), Clock(time.now, oversleep))
    assert [(record.due, record.started) for record in ended.records] == [
        (101, 101.25),
        (101.125, 101.25),
        (103, 103.25),
    ]


async def test_a_failed_request_never_ends_a_run(time):
    ended = await run(InMemoryTarget(time, failing={2}), Rung(ClosedLoop(1), requests(*[None] * 4)), time.clock)
    assert [record.outcome for record in ended.records] == [
        Counted(4, 1),
        RequestFailure("OverloadedError", "the queue is full"),
        Counted(4, 1),
        Counted(4, 1),
    ]


async def test_a_stop_cancels_what_runs_and_keeps_what_has_ended(time):
    target, stop = InMemoryTarget(time, num_answers=1), asyncio.Event()
    running = run(target, Rung(ClosedLoop(2), requests(*[None] * 9)), time.clock, stop)
    ended = await stopped_when_sent(3, target, running, stop)
    assert [record.outcome for record in ended.records] == [Counted(4, 1), None, None]
    assert target.num_cancelled == 2


async def test_a_mistake_of_the_program_is_not_a_failed_request(time, target):
    async def mistaken(_request, _times):
        raise LookupError

    target.send = mistaken
    with pytest.raises(ExceptionGroup) as caught:
        await run(target, Rung(ClosedLoop(1), requests(None)), time.clock)
    assert caught.group_contains(LookupError)


async def test_rungs_and_warm_up_share_no_prefix_cache(time, target):
    """Each has a group of its own, and the warm-up a prompt of its own, as long as the first."""
    generator = generator_of(target, time.clock)
    planned = requests(None)
    await generator.warm_up(planned[0], 0)
    rungs, ended = [Rung(ClosedLoop(1), planned), Rung(ClosedLoop(2), planned)], []
    await run_ladder(generator, rungs, time.clock, stop=asyncio.Event(), make_view=NoView, on_ended=ended.append)
    warm_up, first, second = (request for _, request in target.sent)
    assert len({warm_up.cache_group, first.cache_group, second.cache_group}) == 3
    assert len(warm_up.symbols) == len(first.symbols)
    assert warm_up.symbols != first.symbols == second.symbols
    assert [running.rung.load for running in ended] == [ClosedLoop(1), ClosedLoop(2)]


async def test_a_stopped_ladder_hands_on_the_rung_that_ran_and_begins_no_other(time):
    target, stop, ended = InMemoryTarget(time, num_answers=1), asyncio.Event(), []
    rungs = [Rung(ClosedLoop(1), requests(None, None, None)), Rung(ClosedLoop(2), requests(None))]
    generator = generator_of(target, time.clock)
    running = run_ladder(generator, rungs, time.clock, stop=stop, make_view=NoView, on_ended=ended.append)
    await stopped_when_sent(2, target, running, stop)
    (only,) = ended
    assert [record.outcome for record in only.records] == [Counted(4, 1), None]


def counting(request):
    """A script: as many tokens as asked for, the first two in one message."""
    length = request.stopping.max_tokens
    steps = [Tokens((0, 1)), *(Tokens((number,)) for number in range(2, length))]
    return [
        *steps,
        End(
            FinishReason.LENGTH,
            num_prompt_tokens=len(request.token_ids.ids),
            num_cached_tokens=1,
            num_draft_tokens=2,
            num_accepted_draft_tokens=1,
        ),
    ]


@contextlib.asynccontextmanager
async def connected(server, **options):
    target = await PacelineTarget.connect(
        server.target, None, Sampling(temperature=0.0), ignore_eos=True, now=Clock().now, **options
    )
    try:
        yield target
    finally:
        await target.close()


async def test_a_scheduler_gets_token_ids_and_all_that_makes_runs_comparable():
    async with FakeServer(counting) as server, connected(server) as target:
        ended = await run(target, Rung(ClosedLoop(2), requests(None, None, None)), Clock())
        sent = server.seen.requests
    assert [record.outcome for record in ended.records] == [Counted(4, 3, 1, 2, 1)] * 3
    assert [len(record.times) for record in ended.records] == [2, 2, 2]
    for request in sent:
        assert (request.stopping.max_tokens, request.stopping.ignore_eos, request.sampling.temperature) == (3, True, 0)
        assert (request.cache_salt, request.model) == ("run-1", "fake")
        assert all(125 <= token_id < 875 for token_id in request.token_ids.ids)
    assert len({tuple(request.token_ids.ids) for request in sent}) == 3


async def test_a_refusal_is_counted_and_not_tried_again():
    """Else the benchmark would hide it."""
    refusal = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_seconds=0.01)
    async with FakeServer([refusal]) as server, connected(server) as target:
        ended = await run(target, Rung(ClosedLoop(1), requests(None)), Clock())
        assert len(server.seen.requests) == 1
    assert ended.records[0].outcome == RequestFailure("OverloadedError", "the queue is full")


async def test_an_answer_without_a_token_is_a_failure():
    async with FakeServer([End()]) as server, connected(server) as target:
        ended = await run(target, Rung(ClosedLoop(1), requests(None)), Clock())
    assert ended.records[0].outcome == RequestFailure("NoOutputError", "the answer ended without a token (stop)")


async def test_without_the_model_nothing_begins():
    async with FakeServer() as server:
        with pytest.raises(NotFoundError):
            await PacelineTarget.connect(server.target, "other", Sampling(), ignore_eos=True, now=Clock().now)


def test_prompts_keep_clear_of_end_tokens_and_of_both_ends_of_a_vocabulary():
    model = Model("m", "llama", 99, 24, (7, 23), has_chat_template=False, num_executors=1, num_parameters=None,
                  quantization="", default_sampling=Sampling())  # fmt: skip
    assert prompt_token_ids(model) == [3, 4, 5, 6, *range(8, 21)]


def test_the_live_view_says_what_runs_what_failed_and_how_fast_in_a_line_that_is_gone_at_the_end():
    so_far = RungRun(Rung(ClosedLoop(4), requests(*[None] * 20)), 10.0)
    assert describe(so_far, 10.0) == "0 running, 0 tokens/s"
    for outcome, num_messages in ((Counted(4, 30), 3), (None, 10), (RequestFailure("A", "b"), 0)):
        so_far.records.append(Record(so_far.rung.requests[0], None, 10.0, [11.0] * num_messages, outcome))
    screen = io.StringIO()
    with ProgressBar(Console(width=80, force_terminal=True, color_system=None, file=screen)) as view:
        view.show(so_far, 12.0)
        shown = screen.getvalue()
    for part in ("concurrency 4", "2/20", "1 running, 1 failed, 20 tokens/s"):
        assert part in shown
    assert screen.getvalue().endswith("\x1b[2K")
