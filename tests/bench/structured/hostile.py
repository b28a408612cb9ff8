"""What hostile forms cost those who stream meanwhile: their gaps, by turns with nobody sending one."""

import asyncio
import time

from form_walks.hostile import HOSTILE
from paceline_client import AsyncClient, Grammar, JsonSchema, PacelineError, Regex
from structured.cost import stream_gaps

_FORMS = {"json_schema": JsonSchema, "regex": Regex, "grammar": Grammar}
_ROUNDS, _STREAMS = 3, 8


async def measure(target: str) -> None:
    """Prints a line."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    answers_s: list[float] = []
    async with AsyncClient(target) as client:
        for number in range(_ROUNDS):
            took_s = await _beside(client, gaps[True], answers_s, number)
            await _alone(client, gaps[False], took_s)
    beside, alone = (sorted(gaps[key]) for key in (True, False))
    median, late = (beside[int(len(beside) * share)] / alone[int(len(alone) * share)] for share in (0.5, 0.99))
    print(
        f"{len(answers_s)} hostile forms, answered in at most {1e3 * max(answers_s):.0f} ms; gaps of streams "
        f"{median:.3f} x of without them (median), {late:.3f} x (p99)"
    )


async def _beside(client: AsyncClient, gaps: list[float], answers_s: list[float], number: int) -> float:
    async with stream_gaps(client, _STREAMS, gaps):
        begun_s = time.perf_counter()
        for form in HOSTILE.values():
            if kind := form.WhichOneof("constraint"):
                start_s = time.perf_counter()
                await _ask(client, _FORMS[kind](getattr(form, kind) + "\n" * number))  # nobody knows the answer yet
                answers_s.append(time.perf_counter() - start_s)
        return time.perf_counter() - begun_s


async def _alone(client: AsyncClient, gaps: list[float], seconds: float) -> None:
    async with stream_gaps(client, _STREAMS, gaps):
        await asyncio.sleep(seconds)


async def _ask(client: AsyncClient, form: JsonSchema | Regex | Grammar) -> None:
    try:
        await client.generate("Write: ", structured=form, stopping={"max_tokens": 1})
    except PacelineError as error:
        if not (error.reason or "").startswith("STRUCTURED_"):
            raise
