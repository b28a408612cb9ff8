"""The tokenizer of simulated executors, as the tokenizers library has it: 256 bytes, three special tokens, and words.

Knows how such a file is written. Imports nothing, so that either side can have it without its libraries.
"""

import itertools
import json
import string
from collections.abc import Iterator

VOCAB_SIZE = 259
PRINTABLE = range(32, 127)  # tokens that are characters of ASCII: text made of them can be shown
END_TOKEN_IDS = (258, 256)
_SPECIAL = {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>"}
_AS_IT_STANDS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_bytes_tokenizer(vocab_size: int = VOCAB_SIZE) -> bytes:
    """Return the tokenizer: token b is byte b. Beyond its 259 tokens there are words, so that it is as large as others.

    There are words for 200,000 tokens.
    """
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {text: token for token, text in _SPECIAL.items()}
    merges = list(itertools.islice(_merges(), vocab_size - VOCAB_SIZE))
    vocab |= {left + right: VOCAB_SIZE + index for index, (left, right) in enumerate(merges)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, "special": True, **_AS_IT_STANDS} for token, text in _SPECIAL.items()
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return json.dumps(document).encode()


def _merges() -> Iterator[tuple[str, str]]:
    """Yield what words are made of: two letters, two letters and one, two letters and two."""
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, letters)]
    yield from itertools.product(letters, letters)
    yield from itertools.product(pairs, letters)
    yield from itertools.product(pairs, pairs)


def _byte_characters() -> list[str]:
    """Return the printable stand-in of each byte, as byte-level vocabularies write them (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
