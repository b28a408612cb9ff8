"""The side-by-side table: what is made of recorded answers, and what a run with gaps still says."""

import io

import pytest
from rich.console import Console

from side_by_side import results
from side_by_side.comparison import Bound, Figure, Row, outcome, value
from side_by_side.drivers.protocol import Answer, Request, Workload
from side_by_side.engines import LLAMA, OPENVINO, OURS
from side_by_side.measurements import (
    all_measurements,
    arrival_values,
    mixed_values,
    streams_values,
    workloads_of,
)
from side_by_side.results import EngineFacts, Limits, Results, Sample
from side_by_side.rows import all_rows, mixture_rows
from side_by_side.table import print_table


def sample(engine, repetition, speed, *, others_share=0.0):
    """What an engine did in the measurement `m`."""
    return Sample("m", engine, repetition, {"tok_s": speed}, 0.0, others_share, 0.5, 0.2)


def row(*peers, target=1.5, bound=Bound.AT_LEAST):
    """A line about that measurement."""
    figure = Figure("m", value("tok_s"))
    share = lambda values, limits: values["tok_s"] / limits.read_gb_per_s  # noqa: E731
    return Row("speed", "tok/s", figure, tuple((peer, figure) for peer in peers), bound, target, share)


def a_run(*samples):
    """A run with two peers, one of which could not be installed."""
    engines = {
        OURS: EngineFacts(OURS, "0.1", "through gRPC", "defaults"),
        LLAMA: EngineFacts(LLAMA, "0.3", "batch API", "2 threads"),
        OPENVINO: EngineFacts(OPENVINO, problem="not installed: no matching distribution"),
    }
    return Results("2026-11-21 12:00", "2 cores", engines, [Limits(400.0, 250.0, 170.0)], list(samples))


def printed(outcomes, run):
    text = io.StringIO()
    print_table(outcomes, run, Console(file=text, width=150))
    return text.getvalue().splitlines()


def test_ratios_are_paired_within_a_repetition():
    run = a_run(
        *(sample(OURS, 0, 200.0), sample(LLAMA, 0, 100.0)),
        *(sample(OURS, 1, 100.0), sample(LLAMA, 1, 50.0)),
        *(sample(OURS, 2, 210.0), sample(LLAMA, 2, 100.0)),
        sample(OURS, 3, 200.0),
    )
    made = outcome(row(LLAMA), run)
    assert (made.ours, made.theirs, made.ratio) == (200.0, 100.0, 2.0)
    assert made.limit_share == 0.5
    assert made.is_reached


@pytest.mark.parametrize(("bound", "best"), [(Bound.AT_LEAST, OPENVINO), (Bound.AT_MOST, LLAMA)])
def test_the_best_peer_is_the_one_with_the_better_median(bound, best):
    run = a_run(sample(OURS, 0, 9.0), sample(LLAMA, 0, 3.0), sample(OPENVINO, 0, 4.0))
    assert outcome(row(LLAMA, OPENVINO, bound=bound), run).best == best


@pytest.mark.parametrize(
    ("bound", "target", "is_reached"),
    [
        (Bound.AT_LEAST, 2.0, True),
        (Bound.AT_LEAST, 2.1, False),
        (Bound.AT_MOST, 2.0, True),
        (Bound.AT_MOST, 1.9, False),
    ],
)
def test_a_target_is_a_bound_on_the_ratio(bound, target, is_reached):
    run = a_run(sample(OURS, 0, 8.0), sample(LLAMA, 0, 4.0))
    assert outcome(row(LLAMA, target=target, bound=bound), run).is_reached == is_reached


def test_the_table_of_a_recorded_run_ends_with_how_many_rows_are_reached(tmp_path):
    run = a_run(sample(OURS, 0, 200.0), sample(LLAMA, 0, 100.0, others_share=0.3))
    rows = [row(LLAMA), row(OPENVINO)]
    results.save(run, tmp_path / "run.json")

    read = results.load(tmp_path / "run.json")
    lines = printed([outcome(each, read) for each in rows], read)

    text = "\n".join(lines)
    assert read == run
    assert "200 tok/s │ 100 tok/s (llama.cpp, batch API) │     2 │  ≥ 1.5 │" in text
    assert "reached, disturbed" in text
    assert "not measured" in text
    assert "OpenVINO GenAI: not available: not installed: no matching distribution" in text
    assert "limits, 2 threads: 400.0 GB/s read" in text
    assert lines[-1] == "reached 1 of 2"


def test_a_file_of_another_form_is_refused(tmp_path):
    """Rather than printed as an empty table."""
    (tmp_path / "run.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="not a results file"):
        results.load(tmp_path / "run.json")


def made_up_answers(workloads, *, step_s):
    """Every request gets a token at every step after it was sent; the late ones are sent at the sixteenth."""
    step = {"num_rows": 1, "num_tokens": 1, "busy_s": step_s, "idle_s": 0.0}
    answers = []
    for workload in workloads:
        sent_s = [step_s * request.after_tokens for request in workload.requests]
        token_s = [
            [start_s + step_s * (token + 1) for token in range(request.num_tokens)]
            for start_s, request in zip(sent_s, workload.requests, strict=True)
        ]
        answers.append(Answer(sent_s, token_s, [step]))
    return answers


def test_an_engine_twice_as_fast_has_twice_the_figures():
    run = Results("2026-11-21 12:00", "2 cores", limits=[Limits(30.0, 280.0, 170.0)])
    for measurement in all_measurements():
        for engine in measurement.engines:
            workloads = workloads_of(measurement, 0)
            answers = made_up_answers(workloads, step_s=0.01 if engine.startswith(OURS) else 0.02)
            values = measurement.values(workloads, answers) | {"peak_bytes": 1.0}
            run.samples.append(Sample(measurement.name, engine, 0, values, 0.0, 0.0, 0.5, 0.2))
    made = {each.name: outcome(each, run) for each in (*all_rows(), *mixture_rows())}
    twice = ("decode", "prefill", "8 ", "16 ", "32 ", "experts")
    compared = [made[name].ratio for name in made if name.startswith(twice)]
    assert compared == pytest.approx([2.0] * 11)
    assert made["p99 ITL of 8 streams, 1,900 tokens arrive"].ratio == pytest.approx(0.5)
    assert [each.limit_share is None for each in made.values()].count(False) == 9


def test_engines_get_the_same_prompts_and_no_prompt_comes_twice():
    """The same in every repetition's turn of each engine; new in the next, so that no cache has seen it."""
    prompts = []
    for measurement in all_measurements():
        for repetition in (0, 1):
            workloads = workloads_of(measurement, repetition)
            assert workloads == workloads_of(measurement, repetition)
            prompts += [request.prompt for workload in workloads for request in workload.requests]
    assert len(set(prompts)) == len(prompts)


def test_throughput_counts_from_the_first_request_to_the_last_token():
    answer = Answer([0.0, 1.0], [[2.0, 3.0], [4.0, 5.0]])
    assert streams_values([], [answer])["output_tok_s"] == 4 / 5


def test_only_gaps_while_the_prompt_is_computed_count():
    requests = (Request((1,), 4), Request((2,), 1, after_tokens=1))
    answer = Answer([0.0, 1.5], [[1.0, 2.0, 5.0, 6.0], [4.0]])
    values = arrival_values([Workload(requests)], [answer])
    assert (values["p99_gap_s"], values["first_s"]) == (3.0, 2.5)
    assert values["decoded_tokens"] == 1.0


def test_static_batches_count_only_the_tokens_that_were_wanted():
    """Of a batch of 2 and 6 tokens the first row goes on to 6 as well; both ways 8 tokens count."""
    wanted = Workload((Request((1,), 2), Request((2,), 6)))
    padded = Workload((Request((1,), 6), Request((2,), 6)))

    def answer(*ends):
        return Answer(sent_s=[0.0] * len(ends), token_s=[[end] for end in ends], steps=[])

    values = mixed_values([wanted, padded], [answer(0.5, 1.0), answer(4.0, 4.0)])
    assert values == {"continuous_tok_s": 8.0, "static_tok_s": 2.0}
