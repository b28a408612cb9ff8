"""A rung's result as JSON, in the field names of `vllm bench serve --save-result --save-detailed`.

What that program does not report has names of our own, at the end. Times of single requests are in seconds, statistics
in milliseconds, as there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline_cli.bench.metrics import LatencyStatistics, Summary
from paceline_cli.bench.records import Counted, Record, RequestFailure, RungRun, answer_of
from paceline_cli.bench.rungs import ClosedLoop, OpenLoop, Replay

Fields = dict[str, object]


@dataclass(frozen=True, slots=True)
class Heading:
    """What is true of all rungs of a benchmark."""

    date: str
    backend: str
    model: str
    workload: Mapping[str, object]
    """How the requests were made, for whoever wants to make them again."""


def result_fields(heading: Heading, run: RungRun, summary: Summary) -> Fields:
    """One object for one rung; nothing in it that JSON cannot hold."""
    return {
        "date": heading.date,
        "endpoint_type": heading.backend,
        "backend": heading.backend,
        "label": run.rung.load.label,
        "model_id": heading.model,
        "num_prompts": len(run.rung.requests),
        **_load_fields(run),
        **_figures(summary),
        **_statistics_fields(summary),
        **_request_fields(run),
        **_own_fields(summary),
        "workload": dict(heading.workload),
    }


def _load_fields(run: RungRun) -> Fields:
    match run.rung.load:
        case ClosedLoop(max_concurrency):
            return {"request_rate": "inf", "burstiness": 1.0, "max_concurrency": max_concurrency}
        case OpenLoop(request_rate, burstiness):
            return {"request_rate": request_rate, "burstiness": burstiness, "max_concurrency": None}
        case Replay(name, scale):
            return {
                "request_rate": None,
                "burstiness": None,
                "max_concurrency": None,
                "trace": name,
                "scale_lengths": scale.lengths,
                "scale_rate": scale.rate,
            }


def _figures(summary: Summary) -> Fields:
    return {
        "duration": summary.duration_seconds,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "total_input_tokens": summary.num_input_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }


def _statistics_fields(summary: Summary) -> Fields:
    named: tuple[tuple[str, LatencyStatistics | None], ...] = (
        ("ttft", summary.ttft),
        ("tpot", summary.tpot),
        ("itl", summary.itl),
        ("e2el", summary.e2el),
        ("client_queue_time", summary.late),
    )
    return {
        f"{statistic}_{name}_ms": getattr(statistics, statistic, None)
        for name, statistics in named
        for statistic in LatencyStatistics.__dataclass_fields__
    }


def _request_fields(run: RungRun) -> Fields:
    """One value per request in each list, in the order in which they were sent; 0 where there was no answer."""
    ended = [record for record in run.records if record.outcome is not None]
    answers = [answer_of(record) for record in ended]
    return {
        "input_lens": [_num_input_tokens(record) for record in ended],
        "output_lens": [answer.counted.num_output_tokens if answer else 0 for answer in answers],
        "ttfts": [answer.ttft if answer else 0.0 for answer in answers],
        "itls": [answer.itls if answer else [] for answer in answers],
        "latencies": [answer.latency if answer else 0.0 for answer in answers],
        "start_times": [record.started for record in ended],
        "queue_times": [0.0 if record.due is None else record.started - record.due for record in ended],
        "errors": [
            f"{record.outcome.kind}: {record.outcome.message}" if isinstance(record.outcome, RequestFailure) else ""
            for record in ended
        ],
    }


def _num_input_tokens(record: Record) -> int:
    return record.outcome.num_prompt_tokens if isinstance(record.outcome, Counted) else record.planned.num_prompt_tokens


def _own_fields(summary: Summary) -> Fields:
    return {
        "interrupted": summary.num_interrupted,
        "short": summary.num_short,
        "failures": {failure.kind: failure.count for failure in summary.failures},
        "total_cached_tokens": summary.num_cached_tokens,
        "total_draft_tokens": summary.num_draft_tokens,
        "total_accepted_draft_tokens": summary.num_accepted_draft_tokens,
        "goodput_share": summary.goodput_share,
        "cost_per_million_output_tokens": summary.cost_per_million_output_tokens,
        "cost_per_million_total_tokens": summary.cost_per_million_total_tokens,
    }
