"""Real schemas, one after the other: what ends and is not valid, by two validators that know nothing of grammars."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import jsonschema_rs

from paceline_client import AsyncClient, FinishReason, PacelineError

_IN_FLIGHT = 16
_MESSAGE = "Write an example that keeps to this JSON schema, as JSON and nothing else:\n"
_MAX_SHOWN = 1500  # characters of a schema, which the model need not read to its end


@dataclass
class Outcome:
    """Of all schemas at one temperature."""

    ends: Counter[str] = field(default_factory=Counter)  # stop, length
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    invalid: list[str] = field(default_factory=list)  # names, of those that stopped
    not_begun_as_json: list[str] = field(default_factory=list)  # of those cut by their length

    def __str__(self) -> str:
        num_ended = sum(self.ends.values())
        stopped = self.ends[FinishReason.STOP]
        refused = ", ".join(f"{number} {reason}" for reason, number in self.refusals.most_common())
        return (
            f"{num_ended} written: {stopped} ended ({stopped / max(1, num_ended):.0%}), {len(self.invalid)} of them "
            f"invalid {self.invalid[:5]}; {num_ended - stopped} cut, {len(self.not_begun_as_json)} of them no "
            f"beginning of JSON {self.not_begun_as_json[:5]}; refused: {refused or 'none'}"
        )


def read_schemas(paths: Sequence[Path], count: int) -> list[tuple[str, object]]:
    """Of lines {"name", "schema"}, and of files that each hold one."""
    found = []
    for path in paths:
        if path.suffix == ".jsonl":
            lines = map(json.loads, path.read_text().splitlines())
            found += [(line["name"], line["schema"]) for line in lines]
        else:
            found += [(file.stem, json.loads(file.read_text())) for file in sorted(path.rglob("*.json"))]
    return found[:count]


async def measure(target: str, schemas: Sequence[tuple[str, object]], temperature: float, max_tokens: int) -> Outcome:
    outcome, left = Outcome(), iter(schemas)
    async with AsyncClient(target) as client:
        asking = [_ask(client, left, temperature, max_tokens, outcome) for _ in range(_IN_FLIGHT)]
        await asyncio.gather(*asking)
    return outcome


async def _ask(
    client: AsyncClient, left: Iterator[tuple[str, object]], temperature: float, max_tokens: int, outcome: Outcome
) -> None:
    for name, schema in left:
        text = json.dumps(schema)
        try:
            result = await client.generate(
                messages=[{"role": "user", "content": _MESSAGE + text[:_MAX_SHOWN]}],
                structured=text,
                sampling={"temperature": temperature, "seed": 1},
                stopping={"max_tokens": max_tokens},
            )
        except PacelineError as refusal:
            outcome.refusals[refusal.reason or type(refusal).__name__] += 1
            continue
        outcome.ends[result.finish_reason] += 1
        if result.finish_reason is FinishReason.STOP:
            if not is_valid(result.text, schema):
                outcome.invalid.append(name)
        elif not begins_as_json(result.text):
            outcome.not_begun_as_json.append(name)


def is_valid(text: str, schema: object) -> bool:
    """By both validators, in the draft that the schema names."""
    try:
        value = json.loads(text)
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(value)
        jsonschema_rs.validator_for(schema).validate(value)
    except (ValueError, jsonschema.ValidationError, jsonschema_rs.ValidationError):
        return False
    return True


def begins_as_json(text: str) -> bool:
    """The fault that a parser finds is that the text ends."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        # Inside a string or a word, or where a value, a comma or a colon is due.
        return error.msg.startswith(("Unterminated string", "Invalid \\")) or len(rest.strip()) <= len("false")
    return True
