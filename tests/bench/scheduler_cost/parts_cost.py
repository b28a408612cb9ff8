"""What it costs the scheduler, per token, to cut an output into parts and to tell them."""

import argparse
import random
import time
from collections.abc import Sequence

import numpy as np

from paceline_scheduler.api import wire
from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.outbox import PendingDelta
from paceline_scheduler.api.text.detokenizer import Detokenizer, Spelling
from paceline_scheduler.api.text.parts.bound import BoundTemplate, OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.parts.table import named

MARKS = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = ("The", " capital", " of", " France", " is", ",", '{"', '": {"', '": "', '", "', "name", "arguments", "f", "a")
TAGS = ("<function=", "<parameter=", ">\n", "\n</parameter>", "\n</function>\n")
VOCABULARY = (*MARKS, *WORDS, *TAGS)
SPELT = tuple(word.encode() for word in VOCABULARY)
SPELLING = Spelling(SPELT, SPELT, 0, frozenset(range(len(MARKS))))


def tokens(*words: str) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


def outputs(num_tokens: int) -> dict[str, tuple[str, list[int]]]:
    """By what they are: the format, and the tokens."""
    chance = random.Random(0)  # noqa: S311  no secret
    text = tokens(*(chance.choice(WORDS[:6]) for _ in range(num_tokens)))
    call = tokens("<tool_call>", '{"', "name", '": "', "f", '", "', "arguments", '": {"', "a", '": "')
    pairs = tokens(*(("a", '", "', "a", '": "') * (num_tokens // 4)))
    tags = tokens("<tool_call>", "<function=", "f", ">\n", "<parameter=", "a", ">\n")
    end = tokens("\n</parameter>", "\n</function>\n", "</tool_call>")
    return {
        "text": ("hermes-think@1", text),
        "reasoning": ("hermes-think@1", [*tokens("<think>"), *text]),
        "a long text in a call": ("hermes-think@1", [*call, *text]),
        "short texts in a call": ("hermes-think@1", [*call, *pairs]),
        "a value between marks": ("qwen3-coder@1", [*tags, *text, *end]),
    }


def microseconds(name: str, token_ids: Sequence[int], *, has_parts: bool, num_runs: int) -> float:
    """CPU time of a token, until it stands in a message; the least of the runs."""
    entry = named(name)
    assert entry is not None, "the table has it"
    template = BoundTemplate(entry.template, SPELLING.added, is_whole_turn=False)
    best = float("inf")
    for _ in range(num_runs):
        parts = None
        if has_parts:
            parts = PartCutter(OutputFormat(name, template), Wanted("r1", 0, {}))
            parts.begin(np.zeros(1, dtype=np.int32), SPELLING)
        text = CompletionText(Detokenizer(SPELLING, skip_special_tokens=True, before=[0]), (), parts=parts)
        began_s = time.process_time()
        for offset, token_id in enumerate(token_ids):
            added, _ = text.take([token_id])
            delta = PendingDelta("r1", offset, 1, 0, [token_id], added)
            if has_parts:
                delta.parts = text.take_parts()
            wire.generate_response(delta)
        best = min(best, (time.process_time() - began_s) / len(token_ids) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, default=10_000)
    parser.add_argument("--num-runs", type=int, default=7)
    arguments = parser.parse_args()
    for what, (name, token_ids) in outputs(arguments.num_tokens).items():
        without, with_parts = (
            microseconds(name, token_ids, has_parts=has_parts, num_runs=arguments.num_runs)
            for has_parts in (False, True)
        )
        print(f"{what}: {with_parts - without:.2f} µs more than {without:.2f}")


if __name__ == "__main__":
    main()
