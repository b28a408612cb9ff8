"""result_ring: what steps bring their rows is read on the host as it was, step after step, and never half."""

import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import int32, placed
from paceline_kernels.draws import Advanced, DrawInputs, FinishCode
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.result_ring import ResultRing, RingReader, new_ring, reference, write_results
from paceline_kernels.sampling import SampleOutcome, Samples, SamplingParameters

MAX_PLANNED, MAX_DRAWS, MAX_LOGPROBS = 20, 60, 3
CLOCK = torch.tensor([11, 2**40, 5])


@pytest.fixture(autouse=True)
def _few_at_a_time(is_gpu, monkeypatch):
    """So that every loop goes round more than once."""
    if is_gpu:
        monkeypatch.setattr("paceline_kernels.result_ring.triton._ROWS_AT_A_TIME", 4)
        monkeypatch.setattr("paceline_kernels.result_ring.triton._TOPS_AT_A_TIME", 16)


@dataclasses.dataclass
class Row:
    """A planned row: the tokens that it drew, how many it took, how it stands, what became of the first not taken."""

    drawn: tuple = ()
    num_accepted: int = 0
    finish: FinishCode = FinishCode.GOES_ON
    outcome: SampleOutcome = SampleOutcome.DRAWN

    @property
    def problem(self):
        """What the host is told."""
        is_ours = self.finish == FinishCode.ERROR and self.num_accepted < len(self.drawn)
        return self.outcome if is_ours else SampleOutcome.DRAWN


def columns_of(rows, num_draws, num_logprobs=2):
    """What `advance_rows`, `draw_inputs` and `sample` leave of a step with these rows; padding draws the token 99.

    The log-probability of a token, and the best ones beside it, are made of the token and the draw.
    """
    tokens, outcomes, cu_draws = [], [], [0]
    for row in rows:
        tokens += row.drawn
        outcomes += [row.outcome if draw == row.num_accepted else SampleOutcome.DRAWN for draw in range(len(row.drawn))]
        cu_draws.append(len(tokens))
    padding = num_draws - len(tokens)
    drawn = int32(*tokens, *[99] * padding)
    best = drawn[:, None] % 1000 + torch.arange(num_logprobs, dtype=torch.int32)
    logprobs = -(drawn % 100) - torch.arange(num_draws) / 8
    samples = Samples(drawn, int32(*outcomes, *[1] * padding), logprobs, best, logprobs[:, None] - best)
    finish = torch.tensor([row.finish for row in rows], dtype=torch.uint8)
    nothing = int32(*[0] * num_draws)
    draws = DrawInputs(nothing, int32(*cu_draws), nothing, SamplingParameters(*[nothing] * 7))
    return Advanced(int32(*(row.num_accepted for row in rows)), finish), draws, samples


def ring_on(place, device, num_slots):
    """A ring that an operation may write and the host may read."""
    ring = new_ring(num_slots, MAX_PLANNED, MAX_DRAWS, MAX_LOGPROBS, pinned=device.type == "cuda")
    return ring if device.type == "cuda" else placed(place, ring)


def number_of(step):
    """As the device counts."""
    return torch.tensor([step], dtype=torch.int64)


def written(place, device, ring, step, columns, *, with_logprobs=False):
    """One step's results, in the ring; returns what is the next step for the device."""
    number = place(number_of(step))
    columns = [placed(place, column) for column in columns]
    write_results(ring, number, *columns, place(CLOCK), with_logprobs=with_logprobs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return int(number)


def assert_same(ring, expected):
    """All but the time of the end, which is later than nothing."""
    for field in dataclasses.fields(ResultRing):
        ours, theirs = getattr(ring, field.name), getattr(expected, field.name)
        if field.name == "stamps":
            written_slots = expected.steps >= 0
            assert (ours[written_slots, -1] > 0).all()
            ours, theirs = ours[:, :-1], theirs[:, :-1]
        assert torch.equal(ours, theirs), field.name


def assert_read(results, rows):
    """As the rows are."""
    assert results.num_accepted.tolist() == [row.num_accepted for row in rows]
    assert results.num_draws.tolist() == [len(row.drawn) for row in rows]
    assert results.finish.tolist() == [row.finish for row in rows]
    assert results.problems.tolist() == [row.problem for row in rows]
    assert results.token_ids.tolist() == [token for row in rows for token in row.drawn[: row.num_accepted]]


@st.composite
def planned_rows(draw):
    """A row that drew nothing, one token or several, and took all of them, some or none."""
    drawn = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    taken = draw(st.integers(0, len(drawn)))
    return Row(tuple(drawn), taken, draw(st.sampled_from(FinishCode)), draw(st.sampled_from(SampleOutcome)))


STEPS = st.lists(st.lists(planned_rows(), min_size=1, max_size=MAX_PLANNED - 5), min_size=1, max_size=5)


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(
    steps=STEPS,
    num_slots=st.integers(1, 3),
    first=st.sampled_from([0, 1, 2**31 - 2, 2**40]),
    num_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
def test_every_step_is_read_as_it_was_until_its_slot_is_written_again(backend, steps, num_slots, first, num_logprobs):
    with_logprobs = num_logprobs is not None
    expected = new_ring(num_slots, MAX_PLANNED, MAX_DRAWS, MAX_LOGPROBS, pinned=False)
    with backend.memory() as place:
        ring, expected_number = ring_on(place, backend.device, num_slots), number_of(first)
        reader = RingReader(ring)
        for step, rows in enumerate(steps, first):
            columns = columns_of(rows, sum(len(row.drawn) for row in rows), num_logprobs or 0)
            assert not reader.has_step(step)
            next_step = written(place, backend.device, ring, step, columns, with_logprobs=with_logprobs)
            reference.write_results(expected, expected_number, *columns, CLOCK, with_logprobs=with_logprobs)
            assert next_step == int(expected_number) == step + 1
            assert_same(ring, expected)
            for back in range(min(num_slots, step - first + 1)):
                landed = steps[step - first - back]
                assert_read(reader.results_of(step - back, len(landed)), landed)


def test_log_probabilities_are_those_of_the_tokens_taken(place, device):
    """In their order, as many of the best as samples have; none where none are asked for."""
    rows = [Row((5, 6, 7), 1), Row((), 0), Row((8, 9), 2)]
    columns, ring = columns_of(rows, 6, 2), ring_on(place, device, 2)
    written(place, device, ring, 0, columns, with_logprobs=True)
    written(place, device, ring, 1, columns)
    told, silent = (RingReader(ring).results_of(step, 3) for step in (0, 1))
    samples, taken = columns[2], [0, 3, 4]
    assert told.token_ids.tolist() == silent.token_ids.tolist() == samples.token_ids[taken].tolist()
    assert told.logprobs.tolist() == samples.logprobs[taken].tolist()
    assert told.top_token_ids[:, :2].tolist() == samples.top_token_ids[taken].tolist()
    assert told.top_logprobs[:, :2].tolist() == samples.top_logprobs[taken].tolist()
    assert told.stamps[:-1].tolist() == CLOCK.tolist()
    assert told.top_logprobs[:, 2].tolist() == silent.logprobs.tolist() == [0, 0, 0]


def test_a_row_is_told_why_its_draw_failed_and_only_in_that_step(place, device):
    rows = [
        Row((5, 6, 7), 1, FinishCode.ERROR, SampleOutcome.NOT_FINITE),
        Row((8,), 0, FinishCode.ERROR, SampleOutcome.NOTHING_LEFT),
        Row((), 0, FinishCode.ERROR),
        Row((9, 9), 1, FinishCode.GOES_ON, SampleOutcome.NOT_FINITE),
        Row(),
    ]
    ring = ring_on(place, device, 2)
    written(place, device, ring, 3, columns_of(rows, 9))
    results = RingReader(ring).results_of(3, 5)
    assert results.problems.tolist() == [1, 2, 0, 0, 0]
    assert results.token_ids.tolist() == [5, 9]


def test_results_are_views_of_the_ring():
    ring = new_ring(2, 3, 3, pinned=False)
    reference.write_results(ring, number_of(1), *columns_of([Row((4, 5), 2)], 2, 0), CLOCK)
    results = RingReader(ring).results_of(1, 1)
    for name in ("num_accepted", "finish", "problems", "token_ids", "logprobs", "stamps"):
        assert np.shares_memory(getattr(results, name), getattr(ring, name).numpy()), name


def test_a_step_that_is_not_there_is_not_read():
    ring = new_ring(2, 3, 3, pinned=False)
    reader = RingReader(ring)
    assert not reader.has_step(0)
    reference.write_results(ring, number_of(0), *columns_of([Row((4,), 1)], 1, 0), CLOCK)
    assert (reader.has_step(0), reader.has_step(1), reader.has_step(2)) == (True, False, False)
    with pytest.raises(KernelArgumentError, match="step 2 has not landed: ask `has_step`"):
        reader.results_of(2, 1)
    reference.write_results(ring, number_of(2), *columns_of([Row((4,), 1)], 1, 0), CLOCK)
    with pytest.raises(KernelArgumentError, match="step 0 is gone, its slot holds 2: read a step before 2 more are"):
        reader.has_step(0)


def test_what_a_slot_has_no_room_for_is_refused():
    columns, ring = (*columns_of([Row((1,), 1)] * 3, 3), CLOCK), new_ring(1, 3, 3, 1, pinned=False)
    with pytest.raises(KernelArgumentError, match="a slot has room for 1 to 2 rows with 3 draws, not for 3 with 3"):
        write_results(new_ring(1, 2, 3, pinned=False), number_of(0), *columns)
    with pytest.raises(KernelArgumentError, match="a slot has room for 1 to 3 rows with 2 draws, not for 3 with 3"):
        write_results(new_ring(1, 3, 2, pinned=False), number_of(0), *columns)
    with pytest.raises(KernelArgumentError, match="a slot has room for 1 log-probabilities of a draw, not for 2"):
        write_results(ring, number_of(0), *columns, with_logprobs=True)
    with pytest.raises(KernelArgumentError, match=r"step must be torch\.int64"):
        write_results(ring, int32(0), *columns)
    with pytest.raises(KernelArgumentError, match="step is counted up, so it must be on cpu, not on meta"):
        write_results(ring, number_of(0).to("meta"), *columns)
    there = (Advanced(*(column.to("meta") for column in (columns[0].num_accepted, columns[0].finish))), *columns[1:])
    with pytest.raises(UnsupportedDeviceError, match="device 'meta'; this version has: cpu, and cuda"):
        write_results(ring, number_of(0).to("meta"), *there)


@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_the_step_is_released_to_the_whole_system_behind_a_barrier_and_all_else(architecture):
    """As compiled: what other threads wrote comes before the number, and behind it only the next one is noted."""
    pytest.importorskip("triton")
    script = (
        "from kernel_resources import draws_cases\n"
        "from kernel_resources.compiling import launches_compile_only\n"
        "from paceline_kernels.gpu.no_gpu import compile_for\n"
        f"compile_for({architecture.removeprefix('sm_')})\n"
        "with launches_compile_only() as compiled:\n"
        "    draws_cases.call_results(256, with_logprobs=True)\n"
        "print(compiled[-1].asm['ptx'])\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    ptx = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    steps = re.findall(r"bar\.sync|st\.global|atom\.\S+", ptx)
    release = next(i for i, step in enumerate(steps) if step.startswith("atom."))
    assert {"sys", "release", "exch"} <= set(steps[release].split("."))
    assert steps[release - 1] == "bar.sync"
    assert steps[:release].count("st.global") >= 10
    assert steps[release + 1 :] == ["st.global"]
