"""The rows of the table: which figures stand against which, what is to be reached, and what bounds each.

A share of the limit is the least time that the machine could take for the same work, by the time that was taken.
"""

from collections.abc import Mapping

from side_by_side import model
from side_by_side.comparison import Bound, Figure, Row, rate, value
from side_by_side.engines import LLAMA, LLAMA_EXPERTS, LLAMA_SERVER, OPENVINO, OURS, OURS_EXPERTS, VLLM
from side_by_side.measurements import (
    CONTEXTS,
    DECODED_TOKENS,
    EXPERTS_CONTEXT,
    EXPERTS_STREAMS,
    LONG_PROMPT,
    NUMS_OF_STREAMS,
    STREAM_OUTPUT,
    STREAM_PROMPT,
)
from side_by_side.quality import QUALITY
from side_by_side.results import Limits

_MIB = 1 << 20
_DECODE_TARGETS = dict(zip(CONTEXTS, (1.05, 1.2, 1.3), strict=True))
_PEERS = (LLAMA, OPENVINO, VLLM)
_CONTINUOUS, _STATIC = (Figure("mixed", value(f"{name}_tok_s")) for name in ("continuous", "static"))
_COLD, _WARM = (Figure("prefix", value(f"{name}_first_s", 1e3)) for name in ("cold", "warm"))
_IDLE, _BUSY = (Figure("steps", value(f"{name}_s", 1e3)) for name in ("idle", "busy"))
_MEMORY = Figure("streams-32", value("peak_bytes", 1 / _MIB))
_FAST, _FLOAT32 = (Figure(QUALITY, value(name)) for name in ("fast", "float32"))


def all_rows() -> tuple[Row, ...]:
    """In the order of the table."""
    return (
        *(_decode(context, target) for context, target in _DECODE_TARGETS.items()),
        *(_prefill(length) for length in CONTEXTS[1:]),
        *(_streams(number) for number in NUMS_OF_STREAMS),
        _itself("continuous by static batching, mixed lengths", "tok/s", _CONTINUOUS, _STATIC, Bound.AT_LEAST, 2.0),
        _itself("TTFT, 400-token shared prefix, cold by warm", "ms", _COLD, _WARM, Bound.AT_LEAST, 5.0),
        _arrival(),
        Row("peak memory at 32 streams", "MiB", _MEMORY, _against(_MEMORY, LLAMA), Bound.AT_MOST, 2.0),
        _itself("idle between steps, 1 stream, by step time", "ms", _IDLE, _BUSY, Bound.AT_MOST, 0.05),
        _itself("perplexity, fast path by float32", "", _FAST, _FLOAT32, Bound.AT_MOST, 1.01),
    )


def mixture_rows() -> tuple[Row, ...]:
    """Of a mixture of experts, in the order of the table; no other row's words are in their names."""
    single, streams = "experts-single", "experts-streams"
    return (
        _experts(f"1 request, context {EXPERTS_CONTEXT}", Figure(single, value("decode_tok_s")), 1.0),
        _experts(f"TTFT of {EXPERTS_CONTEXT}, by tokens", Figure(single, rate(EXPERTS_CONTEXT, "first_s")), 1.0),
        _experts(f"{EXPERTS_STREAMS} requests, 128 in, 128 out", Figure(streams, value("output_tok_s")), 1.3),
    )


def _experts(name: str, figure: Figure, target: float) -> Row:
    against = _against(figure, LLAMA_EXPERTS)
    return Row(f"experts: {name}", "tok/s", figure, against, Bound.AT_LEAST, target, engine=OURS_EXPERTS)


def _itself(name: str, unit: str, ours: Figure, other: Figure, bound: Bound, target: float) -> Row:
    """A figure of ours against another one of ours."""
    return Row(name, unit, ours, _against(other, OURS), bound, target)


def _against(figure: Figure, *engines: str) -> tuple[tuple[str, Figure], ...]:
    return tuple((engine, figure) for engine in engines)


def _decode(context: int, target: float) -> Row:
    figure = Figure(f"single-{context}", value("decode_tok_s"))
    return Row(
        f"decode, 1 stream, context {context:,}",
        "tok/s",
        figure,
        _against(figure, LLAMA),
        Bound.AT_LEAST,
        target,
        lambda values, limits: values["decode_tok_s"] * model.decode_step_s(limits, 1, context + DECODED_TOKENS / 2),
    )


def _prefill(length: int) -> Row:
    figure = Figure(f"single-{length}", rate(length, "first_s"))
    return Row(
        f"prefill, prompt of {length:,}",
        "tok/s",
        figure,
        _against(figure, *_PEERS),
        Bound.AT_LEAST,
        2.0,
        lambda values, limits: model.prefill_s(limits, length) / values["first_s"],
    )


def _streams(number: int) -> Row:
    figure = Figure(f"streams-{number}", value("output_tok_s"))

    def limit_share(values: Mapping[str, float], limits: Limits) -> float:
        step_s = model.decode_step_s(limits, number, STREAM_PROMPT + STREAM_OUTPUT / 2)
        least_s = model.prefill_s(limits, STREAM_PROMPT * number) + STREAM_OUTPUT * step_s
        return least_s * values["output_tok_s"] / (STREAM_OUTPUT * number)

    return Row(
        f"{number} streams, 128 in, 128 out",
        "tok/s",
        figure,
        _against(figure, *_PEERS),
        Bound.AT_LEAST,
        1.5,
        limit_share,
    )


def _arrival() -> Row:
    figure = Figure("arrival", value("p99_gap_s", 1e3))

    def limit_share(values: Mapping[str, float], limits: Limits) -> float:
        """What was computed between the prompt's arrival and its first token, at the speed of the machine."""
        least_s = model.prefill_s(limits, LONG_PROMPT)
        least_s += model.operations_s(limits, round(values["decoded_tokens"]))
        return least_s / values["first_s"]

    return Row(
        f"p99 ITL of 8 streams, {LONG_PROMPT:,} tokens arrive",
        "ms",
        figure,
        _against(figure, LLAMA_SERVER, OPENVINO, VLLM),
        Bound.AT_MOST,
        0.5,
        limit_share,
    )
