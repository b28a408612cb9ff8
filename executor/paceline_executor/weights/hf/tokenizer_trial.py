"""The process in which a tokenizer of unknown parts is tried: `python -m paceline_executor.weights.hf.tokenizer_trial`.

It reads a tokenizer.json from its input and encodes a text. What the library raises is no matter here: whoever reads it
next is told, too.
"""

import resource
import sys
from contextlib import suppress

from tokenizers import Tokenizer


def read(data: bytes) -> Tokenizer:
    """What a training run cut and padded its texts to is no matter of serving. Raises whatever the library does."""
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def main() -> None:
    """Its argument is how many bytes of address space it may take."""
    max_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = sys.stdin.buffer.read()
    with suppress(BaseException):  # a panic in it is not even an Exception
        read(data).encode("Hello, world")


if __name__ == "__main__":
    main()
