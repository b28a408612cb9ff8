"""`python -m real_model`: write what transformers answers to ten prompts of the default model."""

import os

from random_models import default_model_path
from real_model import GREEDY_TOKENS, NUM_TOKENS, TEN, fifty_prompts, greedy_tokens_text
from real_model.oracle import Oracle


def main() -> None:
    path = default_model_path(os.environ)
    oracle = Oracle(path)
    outputs = [oracle.greedy(prompt, NUM_TOKENS) for prompt in fifty_prompts(path)[TEN]]
    GREEDY_TOKENS.write_text(greedy_tokens_text(path, outputs), encoding="utf-8")


if __name__ == "__main__":
    main()
