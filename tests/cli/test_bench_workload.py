"""What is sent and when: prompts, lengths, arrivals, and what options mean together."""

import itertools
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_cli.bench.errors import WorkloadError
from paceline_cli.bench.openai_target import WORDS
from paceline_cli.bench.plan import WorkloadOptions, gamma_arrivals
from paceline_cli.bench.prompts import PromptWriter
from paceline_cli.bench.rungs import ClosedLoop, OpenLoop
from paceline_cli.bench.workload import PlannedRequest, Segment, num_too_long

NUM_ARRIVALS = 4000
# The gamma distribution's function at a multiple x of its mean, for the shapes where it is elementary.
DISTRIBUTIONS = {
    1.0: lambda x: 1 - math.exp(-x),
    2.0: lambda x: 1 - math.exp(-2 * x) * (1 + 2 * x),
    0.5: lambda x: math.erf(math.sqrt(x / 2)),
}


def written(rungs, num_symbols, seed=0):
    """All prompts of these rungs."""
    writer = PromptWriter(num_symbols, seed)
    return [tuple(writer.write(request.segments)) for rung in rungs for request in rung.requests]


@pytest.mark.parametrize("burstiness", DISTRIBUTIONS)
def test_gaps_between_arrivals_have_the_distribution_asked_for(burstiness):
    """Kolmogorov-Smirnov, at a level of 1 %: 1 is Poisson, below it bursts, above it evenness."""
    arrivals = itertools.islice(gamma_arrivals(8.0, burstiness, Random(1)), NUM_ARRIVALS)  # noqa: S311  repeatable
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(itertools.chain([0.0], arrivals)))
    distances = (
        max(abs(DISTRIBUTIONS[burstiness](gap * 8.0) - (rank + end) / len(gaps)) for end in (0, 1))
        for rank, gap in enumerate(gaps)
    )
    assert max(distances) < 1.63 / math.sqrt(len(gaps))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.integers(1, 6),
    st.sampled_from([(len(WORDS), 3), (2, 31), (1000, 2), (36_000, 2)]),
    st.integers(0, 30),
    st.integers(0, 2**31),
)
def test_no_two_prompts_are_alike(num_prompts, symbols_and_length, prefix_len, seed):
    num_symbols, shortest = symbols_and_length
    options = WorkloadOptions(
        max_concurrency="1,2,3",
        num_prompts=num_prompts,
        input_len=f"{shortest}-{shortest + 4}",
        shared_prefix_len=prefix_len,
        seed=seed,
    )
    prompts = written(options.rungs(), num_symbols, seed)
    assert len({prompt[prefix_len : prefix_len + shortest] for prompt in prompts}) == 3 * num_prompts
    assert len({prompt[:prefix_len] for prompt in prompts}) == 1


def test_prompts_differ_in_their_very_first_token():
    """As long as there are tokens enough, so that no cache of prefixes finds anything."""
    prompts = written(WorkloadOptions(input_len="16").rungs(), 36_000)
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == 1000


def test_everything_follows_from_the_seed():
    options = [WorkloadOptions(seed=seed, request_rate="5", input_len="9-99", output_len="5-50") for seed in (7, 7, 8)]
    first, second, other = (options.rungs()[0] for options in options)
    assert first == second
    assert [request.at_seconds for request in first.requests] != [request.at_seconds for request in other.requests]
    assert written([first], 500, 7) == written([second], 500, 7)
    assert not set(written([first], 500, 7)) & set(written([other], 500, 8))


def test_the_default_is_the_ladder():
    """1, 4, 16, 32 and 64 at once, 200 requests of 128 in and 128 out each."""
    rungs = WorkloadOptions().rungs()
    assert [rung.load for rung in rungs] == [ClosedLoop(step) for step in (1, 4, 16, 32, 64)]
    for rung in rungs:
        shapes = {
            (request.num_prompt_tokens, request.num_output_tokens, request.at_seconds) for request in rung.requests
        }
        assert (len(rung.requests), shapes) == (200, {(128, 128, None)})


def test_a_shared_prefix_comes_in_addition():
    (rung,) = WorkloadOptions(max_concurrency="2", input_len="10", shared_prefix_len=400, num_prompts=1).rungs()
    assert rung.requests[0].num_prompt_tokens == 410


def test_lengths_are_drawn_from_the_whole_range():
    (rung,) = WorkloadOptions(max_concurrency="2", input_len="3-5", output_len="1-2").rungs()
    assert {request.num_prompt_tokens for request in rung.requests} == {3, 4, 5}
    assert {request.num_output_tokens for request in rung.requests} == {1, 2}


def test_rates_make_a_ladder_of_open_loops():
    slow, fast = WorkloadOptions(request_rate="2,20", burstiness=0.5, num_prompts=50).rungs()
    assert (slow.load, fast.load) == (OpenLoop(2, 0.5), OpenLoop(20, 0.5))
    times = [request.at_seconds for request in slow.requests]
    assert times == sorted(times)
    assert times[-1] > fast.requests[-1].at_seconds > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_concurrency": "1,x"}, "--max-concurrency: '1,x' is no list of numbers"),
        ({"max_concurrency": "0"}, "--max-concurrency"),
        ({"max_concurrency": "1.5"}, "split a request"),
        ({"request_rate": "inf"}, "--request-rate: 'inf'"),
        ({"request_rate": "1", "max_concurrency": "4"}, "--max-concurrency does not go together with --request-rate"),
        ({"request_rate": "1", "burstiness": 0.0}, "--burstiness: 0 is not above 0"),
        ({"burstiness": 2.0}, "--burstiness .* needs a --request-rate"),
        ({"scale_lengths": 0.5}, "--scale-lengths needs a --trace"),
        ({"scale_rate": 0.5}, "--scale-rate needs a --trace"),
        ({"input_len": "long"}, "--input-len: 'long' is no length: write 128, or 64-256"),
        ({"input_len": "0"}, "--input-len: '0'"),
        ({"output_len": "9-3"}, "--output-len: '9-3'"),
        ({"trace": Path("t.csv"), "request_rate": "1"}, "--request-rate does not go together with --trace"),
        ({"trace": Path("t.csv"), "input_len": "1"}, "--input-len does not go together with --trace"),
        ({"trace": Path("t.csv"), "scale_rate": 0.0}, "--scale-rate: 0.0 is not above 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(options, expected):
    with pytest.raises(WorkloadError, match=expected):
        WorkloadOptions(**options).rungs()


def test_requests_beyond_the_context_are_found():
    requests = [PlannedRequest((Segment("a", 90), Segment("b", 5)), length) for length in (4, 5, 6)]
    assert num_too_long(requests, 100) == 1
