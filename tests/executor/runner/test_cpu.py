"""A runner of a CPU: the same bits in any company, faults that stay alone, blocks that can be copied, one warm-up."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.serving import serve
from executor_rig.cpu import cpu_rig, shared_device
from executor_rig.driving import Draw, Driver
from executor_rig.plans import GREEDY as PLAIN
from executor_rig.plans import placement
from kernel_rig import poisoned
from paceline_executor.errors import StartError
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import checked_threads, have_compiled, operations_of
from paceline_executor.runner.interface import RowProblem
from paceline_executor.runner.measuring import fastest_ns
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_kernels.compiler import jit
from random_models import tiny_checkpoint

GREEDY = Draw(num_logprobs=4)
SEEDED = Draw(temperature=0.9, top_p=0.95, seed=123456789012345678, num_logprobs=4)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that is read before it is written is NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the numbers it is computed in."""

    checkpoint: Checkpoint
    numerics: Numerics = FLOAT32_NUMERICS


CASES = {
    "float32": Case(tiny_checkpoint(num_heads=9, num_kv_heads=3)),
    "packed-float16": Case(
        tiny_checkpoint(num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=96),
        Numerics(MatrixKind.PACKED, KvDtype.FLOAT16),
    ),
    "packed-int8": Case(
        tiny_checkpoint(num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=96),
        Numerics(MatrixKind.PACKED, KvDtype.INT8),
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    """Nine heads on three KV heads, like the default model, in all numbers that an executor offers."""
    return CASES[request.param]


def new_runner(case, num_blocks=128, block_size=16, num_threads=1):
    """A runner whose KV cache holds NaN, or a scale of NaN, wherever nothing was written."""
    size = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": num_threads}
    runner = cpu_rig(case.checkpoint, numerics=case.numerics, **size).runner
    for cache in (runner._kv_cache.keys, runner._kv_cache.values):
        cache.fill_(-1 if cache.dtype == torch.int8 else float("nan"))  # four bytes of -1 are a NaN
    return runner


def random_prompt(length, seed):
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


def generate(case, prompt, draw, num_tokens=6, max_chunk=512, mates=(), seed=0):
    """Tokens and log-probabilities of one request, its blocks placed by `seed`, with `mates` in the same steps."""
    driver = Driver(new_runner(case), seed)
    row = driver.add(prompt, draw, max_chunk=max_chunk)
    driver.run([*(driver.add(mate, max_chunk=max_chunk) for mate in mates), row], num_tokens)
    return row.output, row.logprobs


@pytest.mark.parametrize("draw", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 16])
def test_chunks_do_not_change_a_bit(case, draw, chunk):
    prompt = random_prompt(290, seed=chunk)
    assert generate(case, prompt, draw, max_chunk=chunk, seed=1) == generate(case, prompt, draw)


@settings(max_examples=settings.default.max_examples // 8)
@given(
    length=st.integers(1, 80),
    mates=st.lists(st.integers(1, 60), max_size=5),
    chunk=st.sampled_from([1, 7, 16, 64]),
    seed=st.integers(0, 1000),
)
def test_batch_mates_do_not_change_a_bit(case, length, mates, chunk, seed):
    prompt = random_prompt(length, seed)
    prompts = [random_prompt(mate, seed + i + 1) for i, mate in enumerate(mates)]
    together = generate(case, prompt, SEEDED, max_chunk=chunk, mates=prompts, seed=seed)
    assert together == generate(case, prompt, SEEDED)


@pytest.mark.parametrize("num_common", [15, 16, 40, 64])
def test_a_shared_prefix_does_not_change_a_bit(case, num_common):
    prompt = random_prompt(64, seed=1)
    other = prompt[:num_common] + random_prompt(30, seed=2)
    driver = Driver(new_runner(case))
    first = driver.add(other, max_chunk=11)
    driver.run([first], 3)
    second = driver.add(prompt, SEEDED, max_chunk=9, shares=first)
    assert second.num_computed == min(num_common, 63) // 16 * 16
    driver.run([first, second], 6)
    assert (second.output, second.logprobs) == generate(case, prompt, SEEDED)


def test_blocks_that_held_other_tokens_serve_as_well_as_fresh_ones(case):
    """What a released request left in its slots is never read."""
    driver = Driver(new_runner(case, num_blocks=8))
    first = driver.add(random_prompt(100, seed=1))
    driver.run([first], 4)
    driver.drop(first)
    prompt = random_prompt(90, seed=2)
    second = driver.add(prompt, GREEDY)
    driver.run([second], 6)
    assert (second.output, second.logprobs) == generate(case, prompt, GREEDY)


@pytest.mark.skipif(jit.max_threads() < 2, reason="one core")
def test_a_device_has_all_its_threads_after_the_warm_up():
    device = shared_device(2)
    have_compiled(device, ("sample",), lambda _: None)
    assert device.run(jit.num_threads) == 2


@pytest.mark.skipif(jit.max_threads() < 2, reason="one core")
def test_the_number_of_threads_does_not_change_a_bit(case):
    prompt = random_prompt(50, seed=3)
    outputs = []
    for num_threads in (1, 2):
        driver = Driver(new_runner(case, num_threads=num_threads))
        row = driver.add(prompt, SEEDED, max_chunk=16)
        driver.run([row], 6)
        outputs.append((row.output, row.logprobs))
    assert outputs[0] == outputs[1]


def test_logits_that_are_not_finite_are_the_fault_of_their_row(case):
    """Keys of NaN in one request's blocks: it fails, the requests beside it do not notice."""
    prompts = [random_prompt(20, seed) for seed in range(3)]
    clean = [generate(case, prompt, SEEDED) for prompt in prompts]
    runner = new_runner(case)
    driver = Driver(runner)
    rows = [driver.add(prompt, SEEDED) for prompt in prompts]
    driver.step(rows)
    broken = runner._kv_cache.keys[0, rows[1].blocks[0], 0]
    broken.fill_(-1 if broken.dtype == torch.int8 else float("nan"))
    driver.run(rows, 6)
    assert rows[1].fault == RowProblem.NOT_FINITE.value
    assert len(rows[1].output) == 1
    assert [(row.output, row.logprobs) for row in (rows[0], rows[2])] == [clean[0], clean[2]]


def test_a_slot_that_was_never_written_is_a_fault_and_not_a_wrong_token(case):
    driver = Driver(new_runner(case))
    row = driver.add(random_prompt(20, seed=1))
    row.num_computed = 10
    driver.step([row])
    assert row.fault is not None


def test_a_copied_block_serves_as_well_as_the_original(case):
    runner = new_runner(case)
    driver = Driver(runner)
    prompt = random_prompt(40, seed=1)
    first = driver.add(prompt, GREEDY)
    driver.step([first])
    second = driver.add(prompt, GREEDY, max_chunk=39)
    driver.step([second])
    copies = np.array([100, 101, 102], dtype=np.int32)
    assert not set(copies.tolist()) & set(first.blocks + second.blocks)
    runner.copy_blocks(np.array(first.blocks, dtype=np.int32), copies)
    second.blocks = copies.tolist()
    driver.run([first, second], 6)
    assert (second.output, second.logprobs) == (first.output, first.logprobs)


def test_logprobs_come_for_the_rows_that_asked(case):
    driver = Driver(new_runner(case))
    rows = [driver.add(random_prompt(9, seed), Draw(num_logprobs=num)) for seed, num in enumerate((-1, 0, 3))]
    output = driver.step(rows)
    assert [len(row.logprobs) for row in rows] == [0, 1, 1]
    assert output.logprobs.logprobs[1:].tolist() == [rows[1].logprobs[0].chosen, rows[2].logprobs[0].chosen]
    assert output.logprobs.top_logprobs.shape[0] == 3
    assert rows[2].logprobs[0].top_token_ids[0] == rows[2].output[0]
    assert rows[2].logprobs[0].chosen == rows[2].logprobs[0].top_logprobs[0] < 0


def test_no_logprobs_are_computed_where_no_row_asks(case):
    driver = Driver(new_runner(case))
    assert driver.step([driver.add(random_prompt(9, seed), Draw()) for seed in range(2)]).logprobs is None


def test_a_step_that_samples_nothing_draws_nothing(case):
    driver = Driver(new_runner(case))
    output = driver.step([driver.add(random_prompt(20, seed=1), max_chunk=8)])
    assert output.token_ids.size == 0
    assert output.problems == {}
    assert output.forward_ns > 0


def test_positions_beyond_the_pool_take_no_memory():
    rig = cpu_rig(tiny_checkpoint(max_model_len=1 << 24), num_blocks=4, block_size=16)
    assert rig.model.model._rope_tables.shape[1] == 64


def test_warm_up_reports_each_step_and_measures_rising_times(case):
    read, measured = [], []
    rig = cpu_rig(case.checkpoint, numerics=case.numerics, num_blocks=8, block_size=16)
    have_compiled(rig.model.device, operations_of(case.numerics, case.checkpoint.config), read.append)
    points = rig.model.runner(rig.limits, on_progress=measured.append).warm_up()
    assert [size for size, _ in points] == [1, 16, 64]
    assert all(time_ns > 0 for _, time_ns in points)
    operations = operations_of(case.numerics, case.checkpoint.config)
    names = [(step.step.replace("compile", "read"), step.index, step.num_steps) for step in read]
    assert set(names) == {(f"read {name}", index, len(operations)) for index, name in enumerate(operations)}
    assert [(step.step, step.index, step.num_steps) for step in measured] == [
        (f"measure a step of {size} tokens", index, 3) for index, size in enumerate((1, 16, 64))
    ]


def test_a_disturbed_measurement_of_the_warm_up_does_not_count():
    """The least of several is taken: a neighbour makes a step slower, and never faster."""
    times = iter([808, 17, 56])
    assert fastest_ns(lambda: SimpleNamespace(forward_ns=next(times), sample_ns=1)) == 18


def test_nothing_compiles_after_the_warm_up(case, compiled_code):
    """Whatever steps call, of their model, rows, draws, rules, drafts and results: code is kept by types."""
    rig = cpu_rig(case.checkpoint, numerics=case.numerics, num_blocks=32, block_size=16, max_drafts=4)
    ruled = dataclasses.replace(PLAIN, temperature=0.5, frequency_penalty=0.5, logit_bias=((3, 1.0),))
    asked = ({}, {"num_logprobs": 3}, {"num_prompt_logprobs": 1}, {"sampling": ruled})
    requests = [placement(row, [5] * (1 + 29 * row), max_tokens=5, **more) for row, more in enumerate(asked)]

    def served():
        return serve(Engine(RowTable(rig.limits), rig.runner), requests, lambda _, step: 4 if step else 0)

    expected, steps = served()  # all that it needs is imported then
    assert sum(step.verified for step in steps) > 0
    compiled_code.forget()
    have_compiled(shared_device(), operations_of(case.numerics, case.checkpoint.config), lambda _: None)
    before = compiled_code.signatures
    assert served()[0] == expected
    assert compiled_code.signatures == before


def test_the_geometry_says_what_was_allocated(case):
    geometry = new_runner(case, num_blocks=10, block_size=8).kv_geometry
    assert (geometry.num_blocks, geometry.block_size, geometry.num_layers) == (10, 8, 2)
    slot_bytes = {"float32": 16 * 4, "float16": 32 * 2, "int8": 32 + 4}[case.numerics.kv.value]
    assert geometry.bytes_per_block == 2 * 2 * 3 * 8 * slot_bytes


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_an_impossible_number_of_threads_is_refused(num_threads):
    with pytest.raises(StartError, match="the number of threads must be 1 to"):
        checked_threads(num_threads)


def test_a_kv_cache_larger_than_any_memory_is_refused(case):
    with pytest.raises(StartError, match=r"needs \d+ MiB: use fewer"):
        new_runner(case, num_blocks=2**40)
