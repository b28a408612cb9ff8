"""From raw times to figures, compared with straightforward computations by numpy."""

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline_cli.bench.errors import WorkloadError
from paceline_cli.bench.metrics import Objectives, percentile, summarise
from paceline_cli.bench.records import Counted, Record, RequestFailure, RungRun
from paceline_cli.bench.rungs import ClosedLoop, Rung
from paceline_cli.bench.tables import print_rung
from paceline_cli.bench.workload import PlannedRequest, Segment

GAPS = st.floats(0, 5)
FAILED = RequestFailure("OverloadedError", "the queue is full")


def record(started, gaps, *, num_tokens=None, num_prompt_tokens=10, asked=None, outcome=None):
    """A request sent at a time, whose messages came after these gaps."""
    times = list(itertools.accumulate(gaps, initial=started))[1:]
    num_tokens = num_tokens or len(times)
    planned = PlannedRequest((Segment("x", num_prompt_tokens),), asked or num_tokens)
    return Record(planned, None, started, times, outcome or Counted(num_prompt_tokens, num_tokens))


def run_of(*records, ended=10.0, started=0.0):
    """A rung that lasted from 0 s to 10 s."""
    return RungRun(Rung(ClosedLoop(4), [item.planned for item in records]), started, list(records), ended)


def test_what_drafts_brought_is_printed_beside_the_times():
    """Two requests of 12 and 8 tokens, of which 6 and 4 were drafts: 10 others were drawn, one in each step."""
    counted = [Counted(10, 12, 0, 9, 6), Counted(10, 8, 0, 7, 4)]
    summary = summarise(run_of(*(record(0.0, [0.1] * 3, outcome=each) for each in counted)))
    assert (summary.num_draft_tokens, summary.num_accepted_draft_tokens) == (16, 10)
    printed = io.StringIO()
    print_rung(Console(file=printed, width=200), "x", summary)
    assert "62.5% of the drafts became output: 2.00 tokens per request and step" in printed.getvalue()


def numpy_statistics(seconds):
    """The five figures in milliseconds."""
    values = np.array(seconds) * 1000
    return [values.mean(), np.median(values), values.std(), np.percentile(values, 90), np.percentile(values, 99)]


def fields(statistics):
    """Ours, in the same order."""
    return [statistics.mean, statistics.median, statistics.std, statistics.p90, statistics.p99]


@given(st.lists(st.floats(0, 1e4), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 5), st.lists(GAPS, min_size=1, max_size=5), st.integers(0, 3)), min_size=1))
def test_times_are_measured_as_vllm_measures_them(requests):
    records = [record(started, gaps, num_tokens=len(gaps) + more) for started, gaps, more in requests]
    summary = summarise(run_of(*records))

    ttfts = [item.times[0] - item.started for item in records]
    itls = [gap for item in records for gap in np.diff(item.times)]
    latencies = [item.times[-1] - item.started for item in records]
    tpots = [
        (latency - ttft) / (item.outcome.num_output_tokens - 1)
        for item, ttft, latency in zip(records, ttfts, latencies, strict=True)
        if item.outcome.num_output_tokens > 1
    ]
    for ours, theirs in ((summary.ttft, ttfts), (summary.itl, itls), (summary.tpot, tpots), (summary.e2el, latencies)):
        if theirs:
            assert fields(ours) == pytest.approx(numpy_statistics(theirs), abs=1e-6)
        else:
            assert ours is None


@given(st.lists(st.tuples(st.floats(0, 5), GAPS), min_size=1, max_size=12))
def test_concurrency_is_the_most_that_ran_at_any_start(requests):
    records = [record(started, [gap]) for started, gap in requests]
    spans = [(item.started, item.times[-1]) for item in records]
    running = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert summarise(run_of(*records)).max_concurrent_requests == max(running)


def test_rates_count_what_was_answered():
    """What was interrupted counts nowhere: it is only said how many there were."""
    records = [record(0, [1, 1, 1], num_prompt_tokens=7), record(1, [1], num_prompt_tokens=3)]
    records += [record(2, [1], outcome=FAILED), record(0, [1, 1])]
    records[-1].outcome = None
    summary = summarise(run_of(*records))
    assert (summary.num_completed, summary.num_failed, summary.num_interrupted) == (2, 1, 1)
    assert (summary.request_throughput, summary.output_throughput) == (0.2, 0.4)
    assert summary.total_token_throughput == (7 + 3 + 4) / 10


def test_the_best_second_counts_tokens_not_messages():
    """Three tokens in the second from 1 s to 2 s, four messages of two tokens each later."""
    early = record(0.5, [0.6, 0.1, 0.1])
    late = record(0.5, [4.6, 0.1, 0.1, 0.1], num_tokens=8)
    assert summarise(run_of(early)).max_output_tokens_per_s == 3
    assert summarise(run_of(early, late)).max_output_tokens_per_s == pytest.approx(8)


def test_failures_are_counted_by_kind():
    failures = [RequestFailure("A", "one"), RequestFailure("B", "two"), RequestFailure("B", "three")]
    summary = summarise(run_of(*(record(0, [], outcome=failure) for failure in failures)))
    assert [(item.kind, item.count, item.example) for item in summary.failures] == [("B", 2, "two"), ("A", 1, "one")]
    assert summary.ttft is None
    assert summary.output_throughput == 0


def test_answers_that_ended_early_are_counted():
    assert summarise(run_of(record(0, [1], asked=2), record(0, [1], asked=1))).num_short == 1


def test_goodput_needs_all_limits_and_counts_failures():
    """Four requests: good, late in its first token, slow, failed."""
    good, late, slow = record(0, [0.3, 0.05]), record(0, [0.301, 0.05]), record(0, [0.3, 0.051])
    objectives = Objectives.parse(["ttft:300", "tpot:50.5"])
    summary = summarise(run_of(good, late, slow, record(0, [], outcome=FAILED)), objectives)
    assert (summary.goodput_share, summary.request_goodput) == (0.25, 0.1)


def test_a_single_token_has_no_time_per_token_to_miss():
    """As in vllm bench serve, it counts as 0."""
    assert summarise(run_of(record(0, [0.1])), Objectives(tpot=1)).goodput_share == 1


def test_objectives_are_read_as_they_are_typed():
    expected = Objectives(ttft=300, tpot=50)
    assert Objectives.parse(["ttft:300", "tpot:50"]) == expected
    assert Objectives.parse(["ttft:300 tpot:50"]) == Objectives.parse(["ttft:300,tpot:50"]) == expected
    assert Objectives.parse([]) is None


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:3", ":3"])
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(WorkloadError, match="such as ttft:300"):
        Objectives.parse([text])


def test_cost_is_that_of_the_time_the_tokens_took():
    """3.60 an hour is 0.001 a second: 10 s for 4 output tokens and 10 of the prompt."""
    summary = summarise(run_of(record(0, [1, 1, 1, 1])), None, 3.6)
    assert summary.cost_per_million_output_tokens == pytest.approx(0.01 / 4 * 1e6)
    assert summary.cost_per_million_total_tokens == pytest.approx(0.01 / 14 * 1e6)
