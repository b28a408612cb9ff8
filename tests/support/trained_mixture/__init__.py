"""A mixture of experts that has learnt something: a byte-level qwen3_moe, trained on Python's own documentation.

With random weights any choice of experts is as good as another, so that they hide a wrong router.
"""

from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path(__file__).parent / "model"
_END = 256


def tokens_of_text() -> tuple[list[int], list[int]]:
    """To train with, and held out: token b is byte b, and behind each topic its end, as `bytes_tokenizer` has both."""
    tokens = [token for name in sorted(topics) for token in (*topics[name].encode(), _END)]
    cut = len(tokens) * 19 // 20
    return tokens[:cut], tokens[cut:]
