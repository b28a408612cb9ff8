"""How long an answer to a person gets where nobody says: a model that loops would go on to the end of its context."""

from collections.abc import Callable
from typing import TypeVar

import typer

from paceline_client.errors import InvalidRequestError
from paceline_client.results import FinishReason, Result

ANSWER_TOKENS = 1024

_Answer = TypeVar("_Answer")
_FIELDS = ("stopping.max_tokens", "stopping.min_tokens")


def ask_bounded(max_tokens: int | None, ask: Callable[[int | None], _Answer]) -> _Answer:
    """Ask with `max_tokens`, else with the bound, else, where that is refused, with what the context holds (None)."""
    if max_tokens is not None:
        return ask(max_tokens)
    try:
        return ask(ANSWER_TOKENS)
    except InvalidRequestError as error:
        if not any(violation.field in _FIELDS for violation in error.violations):
            raise
    return ask(None)


def tell_if_met(result: Result, max_tokens: int | None) -> None:
    """On stderr, if the bound has ended an answer."""
    is_met = any(
        completion.finish_reason is FinishReason.LENGTH and completion.usage.num_output_tokens == ANSWER_TOKENS
        for completion in result.completions
    )
    if max_tokens is None and is_met:
        typer.echo(f"ended after {ANSWER_TOKENS:,} tokens; --max-tokens lets it be longer", err=True)
