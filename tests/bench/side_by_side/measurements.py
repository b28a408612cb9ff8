"""The measurements: what each engine is asked to run, and what is made of its timings.

A measurement's prompts are the same token ids for every engine and new in every repetition, so that no cache has seen
them. Knows nothing of engines but their names, and nothing of targets.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from side_by_side.drivers.protocol import Answer, Request, Workload
from side_by_side.engines import LLAMA, LLAMA_EXPERTS, LLAMA_SERVER, OPENVINO, OURS, OURS_EXPERTS, VLLM

_FIRST_TOKEN_ID, _PAST_TOKEN_ID = 1_000, 41_000
DECODED_TOKENS = 64
STREAM_PROMPT, STREAM_OUTPUT = 128, 128
_NUM_MIXED, _MIXED_AT_ONCE, _MIXED_PROMPT = 48, 16, 32
_SHORTEST_MIXED, _LONGEST_MIXED = 8, 256
_PREFIX, _OWN_PART, _NUM_PREFIXES = 400, 16, 3
_NUM_RUNNING, LONG_PROMPT, _RUNNING_BEFORE = 8, 1_900, 16
CONTEXTS = (60, 440, 1_900)
NUMS_OF_STREAMS = (8, 16, 32)
EXPERTS_CONTEXT, EXPERTS_STREAMS = 440, 8

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Workloads for some engines, one after the other, and what is made of the answers."""

    name: str
    engines: tuple[str, ...]
    workloads: Callable[[random.Random], Sequence[Workload]]
    values: Callable[[Sequence[Workload], Sequence[Answer]], Values]
    measures_memory: bool = False
    """Whether the engine's memory is watched meanwhile, which costs it a little time."""


def all_measurements() -> tuple[Measurement, ...]:
    """In the order in which they are run."""
    everyone = (OURS, LLAMA, OPENVINO, VLLM)
    return (
        *(Measurement(f"single-{length}", everyone, _single(length), single_values) for length in CONTEXTS),
        *(
            Measurement(f"streams-{number}", everyone, _streams(number), streams_values, number == max(NUMS_OF_STREAMS))
            for number in NUMS_OF_STREAMS
        ),
        Measurement("steps", (OURS,), _watched, steps_values),
        Measurement("prefix", (OURS,), _prefixes, prefix_values),
        Measurement("mixed", (OURS,), _mixed, mixed_values),
        Measurement("arrival", (OURS, LLAMA_SERVER, OPENVINO, VLLM), _arrival, arrival_values),
        Measurement("experts-single", (OURS_EXPERTS, LLAMA_EXPERTS), _single(EXPERTS_CONTEXT), single_values),
        Measurement("experts-streams", (OURS_EXPERTS, LLAMA_EXPERTS), _streams(EXPERTS_STREAMS), streams_values),
    )


def workloads_of(measurement: Measurement, repetition: int) -> Sequence[Workload]:
    """What to run in this repetition: the same for every engine."""
    return measurement.workloads(random.Random(f"{measurement.name} {repetition}"))  # noqa: S311


def single_values(_: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """Of one request: time to the first token, and tokens per second behind those that came with it."""
    (times,), (sent_s,) = answers[0].token_s, answers[0].sent_s
    num_behind = sum(time > times[0] for time in times)
    return {"first_s": times[0] - sent_s, "decode_tok_s": num_behind / (times[-1] - times[0])}


def streams_values(_: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """Output tokens of all requests by the time from the first request to the last token."""
    (answer,) = answers
    return {"output_tok_s": sum(map(len, answer.token_s)) / _span_s(answer)}


def steps_values(_: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """How long the executor computed in steps that only decode, and how long it waited between them."""
    steps = [step for answer in answers for step in answer.steps if step["num_tokens"] == step["num_rows"] > 0]
    return {"busy_s": sum(step["busy_s"] for step in steps), "idle_s": sum(step["idle_s"] for step in steps)}


def arrival_values(workloads: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """Gaps of the running streams that overlap with the time from the long prompt's arrival to its first token."""
    (workload,), (answer,) = workloads, answers
    late = next(number for number, request in enumerate(workload.requests) if request.after_tokens)
    sent_s, first_s = answer.sent_s[late], answer.token_s[late][0]
    running = [times for number, times in enumerate(answer.token_s) if number != late]
    pairs = [pair for times in running for pair in pairwise(times)]
    gaps = sorted(later - earlier for earlier, later in pairs if later > sent_s and earlier < first_s)
    decoded = sum(sent_s < time <= first_s for times in running for time in times)
    values = {"first_s": first_s - sent_s, "decoded_tokens": float(decoded)}
    # None when the running streams had ended before: the engine left the prompt waiting, and nobody felt it.
    if gaps:
        values["p99_gap_s"] = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    return values


def prefix_values(_: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """Times to the first token: of prompts whose prefix was new, and of others with the same prefix."""
    firsts = [answer.token_s[0][0] - answer.sent_s[0] for answer in answers]
    return {"cold_first_s": median(firsts[::2]), "warm_first_s": median(firsts[1::2])}


def mixed_values(workloads: Sequence[Workload], answers: Sequence[Answer]) -> Values:
    """Wanted output tokens per second: requests that follow each other, and batches that wait for their longest.

    Such "static" batches compute every row until the longest ends, as in Orca (Yu et al., OSDI 2022).
    """
    wanted = sum(request.num_tokens for request in workloads[0].requests)
    continuous, *static = map(_span_s, answers)
    return {"continuous_tok_s": wanted / continuous, "static_tok_s": wanted / sum(static)}


def _span_s(answer: Answer) -> float:
    return max(times[-1] for times in answer.token_s) - min(answer.sent_s)


def _prompt(chance: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_TOKEN_ID, _PAST_TOKEN_ID) for _ in range(length))


def _single(length: int) -> Callable[[random.Random], Sequence[Workload]]:
    return lambda chance: [Workload((Request(_prompt(chance, length), DECODED_TOKENS),))]


def _watched(chance: random.Random) -> Sequence[Workload]:
    (alone,) = _single(CONTEXTS[0])(chance)
    return [replace(alone, is_watched=True)]


def _streams(number: int) -> Callable[[random.Random], Sequence[Workload]]:
    def workloads(chance: random.Random) -> Sequence[Workload]:
        return [Workload(tuple(Request(_prompt(chance, STREAM_PROMPT), STREAM_OUTPUT) for _ in range(number)))]

    return workloads


def _arrival(chance: random.Random) -> Sequence[Workload]:
    (running,) = _streams(_NUM_RUNNING)(chance)
    late = Request(_prompt(chance, LONG_PROMPT), 2, after_tokens=_RUNNING_BEFORE)
    return [replace(running, requests=(*running.requests, late))]


def _prefixes(chance: random.Random) -> Sequence[Workload]:
    workloads = []
    for _ in range(_NUM_PREFIXES):
        prefix = _prompt(chance, _PREFIX)
        workloads += [Workload((Request(prefix + _prompt(chance, _OWN_PART), 2),)) for _ in ("cold", "warm")]
    return workloads


def _mixed(chance: random.Random) -> Sequence[Workload]:
    """All requests, so many at once; then others of the same lengths in batches, padded to the longest."""
    ratio = _LONGEST_MIXED / _SHORTEST_MIXED
    lengths = [round(_SHORTEST_MIXED * ratio ** chance.random()) for _ in range(_NUM_MIXED)]

    def requests() -> tuple[Request, ...]:
        return tuple(Request(_prompt(chance, _MIXED_PROMPT), length) for length in lengths)

    def padded(batch: tuple[Request, ...]) -> Workload:
        longest = max(request.num_tokens for request in batch)
        return Workload(tuple(replace(request, num_tokens=longest) for request in batch))

    continuous, static = Workload(requests(), at_most=_MIXED_AT_ONCE), requests()
    batches = [static[first : first + _MIXED_AT_ONCE] for first in range(0, _NUM_MIXED, _MIXED_AT_ONCE)]
    return [continuous, *map(padded, batches)]
