"""The default model's prompts, and what an independent implementation answers to ten of them.

`greedy_tokens.json` is the output of `PYTHONPATH=tests/support .venv/bin/python -m real_model`, which computes it with
transformers. It belongs to one file of the model, whose digest it names.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from paceline_executor.weights import load_tokenizer
from paceline_executor.weights.fetch.fetching import sha256_of

TEN = slice(0, 50, 5)  # far apart, so of many kinds
NUM_TOKENS = 16
GREEDY_TOKENS = Path(__file__).with_name("greedy_tokens.json")


def fifty_prompts(model: Path) -> list[list[int]]:
    """Token ids of prompts of many kinds: chats as the model's template would render them, texts as they are."""
    tokenizer = Tokenizer.from_str(load_tokenizer(model).tokenizer_json.decode())
    prompts = json.loads(Path(__file__).with_name("fifty_prompts.json").read_text(encoding="utf-8"))
    texts = [
        prompt.get("text") or f"<|im_start|>user\n{prompt['user']}<|im_end|>\n<|im_start|>assistant\n"
        for prompt in prompts
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def greedy_tokens_text(model: Path, outputs: Sequence[Sequence[int]]) -> str:
    """The file `greedy_tokens.json`: an output per line."""
    lines = ",\n".join(f"    {list(output)}" for output in outputs)
    return f'{{\n  "sha256": "{sha256_of(model)}",\n  "tokens": [\n{lines}\n  ]\n}}\n'
