"""The runner on the twin of a GPU: captures, lateness and steps in flight change nothing of what comes out.

The other side of every comparison is a CPU, one step at a time, whose rows are described anew before each step.
"""

from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from random import Random
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_rig.cpu import cpu_runner
from executor_rig.plans import placement, plan
from executor_rig.random_plans import LIMITS, Request, Scheduler
from executor_rig.stepping import outcome_of
from paceline.plan.sampling import SamplingParams
from paceline_executor.errors import DeviceFaultError
from paceline_executor.link.engine import Engine
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device import runner as device_runners
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_kernels.devices import cpu_stands_for_gpu
from random_models import MIXTURE_CONFIGS, TINY_CONFIG, RandomCheckpoint

CONFIGS = {
    name: replace(config, vocab_size=LIMITS.vocab_size)
    for name, config in {"dense": TINY_CONFIG, "mixture": MIXTURE_CONFIGS["qwen2moe"]}.items()
}
BUCKETS = buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens)


def cold_runner(buckets, model="dense", on_progress=lambda _: None):
    """A runner that has captured nothing, and its device."""
    device, config = TwinDevice(), CONFIGS[model]
    geometry = kv_geometry(config, LIMITS.num_blocks, LIMITS.block_size, FLOAT32_NUMERICS)
    kv_cache = allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv)
    computed = LlamaModel(HostWeights(RandomCheckpoint(config)), LIMITS.max_model_len)
    runner = DeviceRunner(device, computed, kv_cache, geometry, LIMITS, buckets=buckets, on_progress=on_progress)
    return runner, device


@cache
def device_runner(buckets=BUCKETS, model="dense"):
    """A warm runner, and its device. Tables come and go; it remembers rows that it must forget."""
    runner, device = cold_runner(buckets, model)
    runner.warm_up()
    return runner, device


@cache
def on_cpu(model="dense"):
    """The other side."""
    return cpu_runner(RandomCheckpoint(CONFIGS[model]), num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)


SAMPLINGS = (
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
    SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01, seed=2**63 + 1),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, repetition_penalty=1.6),
    SamplingParams(
        temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=9, presence_penalty=0.5, logit_bias=((3, 4.0), (7, -2.0))
    ),
    SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=4, allowed_token_ids=(1, 2, 3, 4, 5)),
)


def asking(placed, of_name):
    """A placement that asks for what its request asks for."""
    index = of_name[placed.record_id.request_id]
    wants_prompt = index % 4 == 0 and placed.num_cached_tokens == 0
    return replace(
        placed,
        sampling=SAMPLINGS[index % len(SAMPLINGS)],
        num_logprobs=None if index % 3 else index % 5,
        num_prompt_logprobs=2 if wants_prompt else None,
        bad_word_token_ids=((2, 3), (4,)) if index % 2 else (),
        min_tokens=2 if index % 3 == 1 else 0,
    )


class Pair:
    """The same plans on a device, launched ahead, and on the CPU, one by one."""

    def __init__(self, wanted, seed, buckets, model):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        runner, self.device = device_runner(buckets, model)
        self.device.late_by(seed)
        self.ahead = Engine(RowTable(LIMITS), runner)
        self.cpu = on_cpu(model)
        self.one_by_one = Engine(RowTable(LIMITS), self.cpu)
        self.scheduler = Scheduler(self.random, [Request(f"request-{i}", *one) for i, one in enumerate(wanted)])
        self.kinds = {f"request-{i}": self.random.randrange(60) for i in range(len(wanted))}
        self.in_flight = deque()  # plan, ticket, whether its launch failed

    def run(self, failing, reached):
        """Plan, launch and land at random until every request is done."""
        for _ in range(2000):
            if self.scheduler.is_done and not self.in_flight:
                return
            if len(self.in_flight) < self.ahead.max_in_flight and self.random.random() < 0.75:
                planned = self.scheduler.plan()
                placed = tuple(asking(place, self.kinds) for place in planned.new_requests)
                self.launch(replace(planned, new_requests=placed), failing, reached)
            elif self.in_flight:
                self.land(reached)

    def launch(self, planned, failing, reached):
        """Launch a plan; where it needs what has not landed, that lands first."""
        while not self.ahead.can_launch(planned):
            if not self.land(reached):
                return  # the plan is of an epoch that is over
        fails = self.random.random() < failing
        self.device.fail_next = MemoryError("of the test") if fails else None
        ticket = self.ahead.launch(planned)
        self.in_flight.append((planned, ticket, fails and self.device.fail_next is None))
        self.device.fail_next = None
        reached["in flight", len(self.in_flight)] += 1

    def land(self, reached):
        """Land the oldest step and execute it on the other side; says whether it did not fail."""
        planned, ticket, fails = self.in_flight.popleft()
        result = outcome_of(lambda: self.ahead.collect(ticket))
        self.one_by_one.table.begin_device()  # which describes all rows anew
        failing = Mock(side_effect=MemoryError("of the test"))
        with patch.multiple(self.cpu, launch=failing, copy_blocks=failing) if fails else nullcontext():
            expected = outcome_of(lambda: self.one_by_one.collect(self.one_by_one.launch(planned)))
        assert repr(result) == repr(expected)
        if result is None:
            reached["failed"] += 1
            self.in_flight.clear()
            self.scheduler.rebuild(self.ahead.table.states())
            return False
        reached["log-probabilities"] += bool(result.logprobs)
        reached["prompt log-probabilities"] += bool(result.prompt_logprobs)
        self.scheduler.take(planned, result)
        assert self.in_flight or repr(self.ahead.table.states()) == repr(self.one_by_one.table.states())
        return True


wanted = st.tuples(st.lists(st.integers(0, 49), min_size=1, max_size=10), st.integers(1, 8), st.integers(0, 49))
requests = st.lists(wanted, min_size=2, max_size=6)


@pytest.mark.hypothesis
@pytest.mark.parametrize("failing", [0.0, 0.1])
@pytest.mark.parametrize("buckets", [BUCKETS, Buckets([])], ids=["captured", "launched one by one"])
@pytest.mark.parametrize("model", ["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def test_a_device_that_keeps_rows_says_what_the_cpu_says(model, buckets, failing):
    """Chunks, shared prefixes, preempted rows and failed steps at random."""
    reached = Counter()

    @settings(max_examples=settings.default.max_examples // 5)
    @given(requests, st.integers(0, 2**32))
    def both_say_the_same(wanted, seed):
        pair = Pair(wanted, seed, buckets, model)
        pair.run(failing, reached)
        assert pair.scheduler.is_done

    both_say_the_same()
    branches = [("in flight", 2), "log-probabilities", "prompt log-probabilities", *(["failed"] if failing else [])]
    assert all(reached[branch] >= 5 for branch in branches), reached


def drawn_tokens(engine, num_tokens):
    """What each step of three rows draws, and whether they end."""
    return [(step.token_ids.tolist(), step.finishes.tolist()) for step in results_of(engine, num_tokens)]


def results_of(engine, num_tokens):
    """Results of three rows: prompts together and then decodes, as many steps in flight as there may be."""
    rows, samplings = range(LIMITS.num_rows), (SAMPLINGS[1], SAMPLINGS[3], SAMPLINGS[4])
    place = [placement(row, [5, 6, 7 + row], max_tokens=num_tokens, sampling=samplings[row]) for row in rows]
    cells = [(row, index, 3 * row + index) for row in rows for index in range(3)]
    plans = [plan([(row, 3) for row in rows], place=place, grants=cells)]
    plans += [plan([(row, 1) for row in rows], step_id=2 + step) for step in range(num_tokens - 1)]
    tickets = deque()
    for planned in plans:
        if len(tickets) == engine.max_in_flight:
            yield engine.collect(tickets.popleft())
        tickets.append(engine.launch(planned))
    yield from map(engine.collect, tickets)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [("dense", 2), ("mixture", 2), *(pytest.param(model, 6, marks=pytest.mark.slow) for model in CONFIGS)],
)
def test_the_kernels_of_a_gpu_draw_what_the_cpu_draws(model, num_tokens):
    """Interpreted, in a runner on the twin: with top-k and top-p, penalties and a mask, to the end of the rows."""
    cpu = drawn_tokens(Engine(RowTable(LIMITS), on_cpu(model)), num_tokens)
    with np.errstate(all="ignore"), cpu_stands_for_gpu():
        gpu = drawn_tokens(Engine(RowTable(LIMITS), cold_runner(Buckets([]), model)[0]), num_tokens)
    assert gpu == cpu
    assert all(gpu[-1][1])


def launched_steps(engine, num_steps):
    """A row's prompt and so many tokens behind it, one step at a time; returns the tokens."""
    place, cells = [placement(0, [5, 6], max_tokens=20)], [(0, index, index) for index in range(6)]
    plans = [plan([(0, 2)], place=place, grants=cells)]
    plans += [plan([(0, 1)], step_id=step_id) for step_id in range(2, 2 + num_steps)]
    return [engine.collect(engine.launch(planned)).token_ids.tolist() for planned in plans]


def test_a_row_that_decodes_needs_not_a_word(monkeypatch):
    runner, _ = device_runner()
    words = []
    write = device_runners.PlanWriter.write
    monkeypatch.setattr(
        device_runners.PlanWriter, "write", lambda self, *plan: [words.append(plan[-1].size), write(self, *plan)][1]
    )
    launched_steps(Engine(RowTable(LIMITS), runner), 10)
    assert words[0] > 0
    assert words[1:] == [0] * 10


def test_what_a_slot_has_no_room_for_comes_before_the_step(monkeypatch):
    expected = launched_steps(Engine(RowTable(LIMITS), device_runner()[0]), 5)
    monkeypatch.setattr(device_runners, "_WORDS_PER_ROW", 0)
    device_runner.cache_clear()
    assert launched_steps(Engine(RowTable(LIMITS), device_runner()[0]), 5) == expected
    device_runner.cache_clear()


@pytest.fixture
def lost_device():
    """An engine whose device fails, as CUDA's do, at whatever it is asked from the call on."""
    device_runner.cache_clear()
    runner, device = device_runner()
    yield Engine(RowTable(LIMITS), runner), lambda: setattr(device, "lost", RuntimeError("an illegal memory access"))
    device_runner.cache_clear()


def test_a_device_that_fails_while_it_computes_ends_the_executor(lost_device):
    engine, lose = lost_device
    ticket = engine.launch(plan([(0, 2)], place=[placement(0, [5, 6])], grants=[(0, 0, 2)]))
    lose()
    assert engine.is_done(ticket)
    with pytest.raises(DeviceFaultError, match="this executor ends"):
        engine.collect(ticket)


@pytest.mark.parametrize("copies", [[], [(0, 1)]])
def test_a_device_that_has_failed_when_a_step_is_launched_ends_the_executor(lost_device, copies):
    """It is no step that could be taken back: the next one would fail, too."""
    engine, lose = lost_device
    lose()
    granted = [(0, 0, 2), *([(0, 1, 1)] if copies else [])]
    ticket = engine.launch(plan([(0, 2)], place=[placement(0, [5, 6])], grants=granted, copies=copies))
    with pytest.raises(DeviceFaultError, match="this executor ends"):
        engine.collect(ticket)


def test_the_warm_up_captures_every_bucket_and_measures_steps():
    told = []
    runner, _ = cold_runner(BUCKETS, on_progress=told.append)
    points = runner.warm_up()
    assert [size for size, _ in points] == [1, 16]
    assert all(step_ns > 0 for _, step_ns in points)
    assert [progress.index for progress in told] == list(range(len(list(BUCKETS)) + 2))
    assert all(tensor.isfinite().all() for tensor in runner._kv_cache.of_blocks)


def test_nothing_is_in_a_capture_before_its_first_replay():
    """On a GPU whatever lay there: a row taken from it would be written to. Its twin refuses to show it."""
    captured = TwinDevice().capture(lambda: None)
    with pytest.raises(RuntimeError, match="replay it"):
        _ = captured.outputs
