"""Requests that ask for much, drawn by number, and all that comes of each: in steps with others, or alone."""

from dataclasses import replace
from typing import Any

from paceline.plan.values import NewRequest, StepResult
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.testing.plans import GREEDY, placement, plan
from paceline_executor.testing.random_plans import LIMITS, Request

FEW = (1, 2, 3, 4, 5)  # so that lookups find something, and words are met
_SAMPLINGS = (
    GREEDY,
    replace(GREEDY, temperature=0.7, top_k=7, top_p=0.9, min_p=0.01, seed=2**63 + 1),
    replace(GREEDY, temperature=1.0, seed=4, allowed_token_ids=FEW),
    replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.6, allowed_token_ids=FEW),
    replace(GREEDY, temperature=0.7, seed=9, presence_penalty=0.5, frequency_penalty=-0.4, logit_bias=((3, 4.0),)),
)


def asking(placed: NewRequest, number: int) -> NewRequest:
    """The same placement with what request `number` asks for; some name the last token of the vocabulary."""
    return replace(
        placed,
        sampling=_SAMPLINGS[number % len(_SAMPLINGS)],
        num_logprobs=None if number % 3 else number % 5,
        bad_word_token_ids=((2, 3), (4,), (LIMITS.vocab_size - 1,)) if number % 2 else (),
        min_tokens=2 if number % 3 == 1 else 0,
    )


class Outcome:
    """All that came of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[tuple[int, float]] = []
        self.finish = 0
        self.error = ""

    def take(self, result: StepResult, row: int, tokens: list[int]) -> None:
        """Of this result."""
        self.tokens += tokens
        self.finish = int(result.finishes[result.rows.tolist().index(row)])
        self.error = next((error.reason for error in result.errors if error.row == row), "")
        for told in result.logprobs:
            if told.row == row:
                self.logprobs += zip(told.token_ids.tolist(), told.columns.logprobs.tolist(), strict=True)


def outcome_alone(runner: Runner, request: Request, number: int) -> Outcome:
    """What comes of request `number` alone, step by step, without drafts."""
    engine, outcome = Engine(RowTable(LIMITS), runner), Outcome()
    placed = placement(0, request.prompt, max_tokens=request.max_tokens, end_token_ids=[request.end_token])
    cells = [(0, index, index) for index in range(LIMITS.max_blocks_per_row)]
    contents: dict[str, Any] = {"place": [asking(placed, number)], "grants": cells}
    num_tokens = len(request.prompt)
    while not outcome.finish:
        result = engine.collect(engine.launch(plan([(0, num_tokens)], **contents)))
        outcome.take(result, 0, result.token_ids.tolist())
        contents, num_tokens = {}, 1
    return outcome
