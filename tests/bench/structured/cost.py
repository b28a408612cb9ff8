"""What a form costs those that have one, and those beside: ratios of medians, by turns in one run."""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from paceline_client import AsyncClient, JsonSchema

_ROUNDS = 5
_TOKENS = 128
_NO_DRAFTS = {"max_num_draft_tokens": 0}
_RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer"},
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "state": {"enum": ["open", "closed", "waiting"]},
        "share": {"type": "number"},
    },
    "required": ["identifier", "name", "tags", "state", "share"],
    "additionalProperties": False,
}
# It goes on for longer than any of these outputs.
_LONG_LIST = {"type": "array", "items": _RECORD, "minItems": 400}
_LONG_KEYS = {
    "type": "object",
    "properties": {
        name: {"type": "boolean"} for name in (f"is_permitted_to_change_the_{i}th_setting" for i in range(8))
    },
    "additionalProperties": False,
}
_LONG_KEYS["required"] = list(_LONG_KEYS["properties"])

Ask = Callable[[], Awaitable[float]]


async def measure(target: str) -> None:
    """Prints a line for each."""
    async with AsyncClient(target) as client:
        for num_rows in (1, 8, 32):
            plain, structured = await _by_turns(
                lambda n=num_rows: _token_s(client, [None] * n), lambda n=num_rows: _token_s(client, [_LONG_LIST] * n)
            )
            print(f"{num_rows} rows: {1e3 * plain:.2f} ms between tokens, {structured / plain:.3f} x with a form")
        alone, beside = await _by_turns(
            lambda: _token_s(client, [None] * 9, of=8), lambda: _token_s(client, [None] * 8 + [_LONG_LIST], of=8)
        )
        print(f"8 rows beside one with a form: {beside / alone:.3f} x of beside one without")
        await _first_tokens(client)
        await _forced(client)


async def _by_turns(first: Ask, second: Ask) -> tuple[float, float]:
    """Returns medians; warms up."""
    await first()
    await second()
    pairs = [(await first(), await second()) for _ in range(_ROUNDS)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


async def _token_s(client: AsyncClient, forms: list[object], of: int | None = None) -> float:
    """The median time between tokens, of the first so many requests."""
    results = await asyncio.gather(*(_timed(client, index, form) for index, form in enumerate(forms)))
    return statistics.median(results[:of])


async def _timed(client: AsyncClient, index: int, form: object) -> float:
    stopping = {"max_tokens": _TOKENS} if form is not None else {"max_tokens": _TOKENS, "ignore_eos": True}
    result = await client.generate(
        f"Item {index}: ", stopping=stopping, scheduling=_NO_DRAFTS, sampling={"temperature": 0.0}, **_form(form)
    )
    times = result.completions[0].times
    assert times is not None
    return times.decode / max(1, len(result.token_ids) - 1)


def _form(schema: object) -> dict[str, Any]:
    return {} if schema is None else {"structured": schema}


async def _first_tokens(client: AsyncClient) -> None:
    numbers = itertools.count()

    async def first_ms(form: object, prompt: str = "Write: ") -> float:
        start = time.perf_counter()
        async for _ in client.stream(f"{next(numbers)} {prompt}", stopping={"max_tokens": 1}, **_form(form)):
            break
        return 1e3 * (time.perf_counter() - start)

    small = [(await first_ms(None), await first_ms(_numbered(index, 3))) for index in range(60)][10:]
    plain, structured = (sorted(column) for column in zip(*small, strict=True))
    added = [statistics.median(structured) - statistics.median(plain), structured[-1] - plain[-1]]
    print(f"first token of an idle system: {added[0]:+.1f} ms (median), {added[1]:+.1f} ms (of 50 the latest)")
    large = [_numbered(index, 500) for index in range(100)]
    gaps: dict[bool, list[float]] = {}
    firsts: dict[bool, list[float]] = {}
    for has_form in (False, True):
        gaps[has_form] = []
        async with stream_gaps(client, 8, gaps[has_form]):
            firsts[has_form] = sorted([await first_ms(schema if has_form else None) for schema in large])
    at = {False: sorted(gaps[False]), True: sorted(gaps[True])}
    p99 = {key: 1e3 * values[int(len(values) * 0.99)] for key, values in at.items()}
    median = statistics.median(firsts[True]) - statistics.median(firsts[False])
    size = len(json.dumps(large[0])) // 1024
    print(
        f"100 schemas of {size} KiB beside 8 streams: first token {median:+.1f} ms (median), "
        f"{firsts[True][98] - firsts[False][98]:+.1f} ms (p99); gaps of the streams at p99 {p99[True]:.0f} ms, "
        f"{p99[True] / p99[False]:.2f} x of beside plain requests"
    )


@asynccontextmanager
async def stream_gaps(client: AsyncClient, num_streams: int, gaps: list[float]) -> AsyncIterator[None]:
    """Between tokens of so many streams, which go on meanwhile."""
    stopping = asyncio.Event()
    streams = [asyncio.ensure_future(_gaps(client, stopping, gaps)) for _ in range(num_streams)]
    await asyncio.sleep(1.0)
    yield
    stopping.set()
    await asyncio.gather(*streams)


async def _gaps(client: AsyncClient, stopping: asyncio.Event, gaps: list[float]) -> None:
    while not stopping.is_set():
        last = None
        async for _ in client.stream("Once", stopping={"max_tokens": 400, "ignore_eos": True}, scheduling=_NO_DRAFTS):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            if stopping.is_set():
                break


def _numbered(number: int, num_properties: int) -> object:
    """A form of its own."""
    names = [f"field_{number}_{index}" for index in range(num_properties)]
    properties = {name: {"type": "string", "maxLength": 20 + len(name)} for name in names}
    return {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}


async def _forced(client: AsyncClient) -> None:
    result = await client.generate(
        "Settings: ",
        structured=JsonSchema(_LONG_KEYS, compact=True),
        stopping={"max_tokens": 400},
        sampling={"temperature": 0.0},
    )
    usage = result.usage
    num_steps = usage.num_output_tokens - usage.num_accepted_draft_tokens
    print(
        f"long keys: {usage.num_output_tokens} tokens in {num_steps} steps "
        f"({usage.num_output_tokens / num_steps:.2f} a step), {usage.num_accepted_draft_tokens} of "
        f"{usage.num_draft_tokens} drafts right"
    )
