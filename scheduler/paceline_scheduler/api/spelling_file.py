"""What tokens spell, as a file: read in a tenth of the time that a vocabulary takes."""

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from paceline_scheduler.api.detokenizer import Spelling

_LENGTH = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TokenTexts:
    spelling: Spelling
    bos_token: str | None
    eos_token: str | None


def pack(texts: TokenTexts) -> bytes:
    all_bytes, without = texts.spelling.token_bytes, texts.spelling.token_bytes_without_special
    head = {
        "bos_token": texts.bos_token,
        "eos_token": texts.eos_token,
        "num_stripped_spaces": texts.spelling.num_stripped_spaces,
        "num_tokens": len(all_bytes),
        "special_ids": [i for i, (one, other) in enumerate(zip(all_bytes, without, strict=True)) if one != other],
    }
    lengths = np.array([len(one) for one in all_bytes], dtype=_LENGTH)
    return b"".join((json.dumps(head).encode(), b"\n", lengths.tobytes(), *all_bytes))


def unpack(data: bytes) -> TokenTexts:
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    num_tokens = int(head["num_tokens"])
    lengths = np.frombuffer(body, dtype=_LENGTH, count=num_tokens).tolist()
    ends = accumulate(lengths, initial=num_tokens * _LENGTH.itemsize)
    all_bytes = [body[start:end] for start, end in pairwise(ends)]
    without = list(all_bytes)
    for token_id in head["special_ids"]:
        without[token_id] = b""
    spelling = Spelling(tuple(all_bytes), tuple(without), head["num_stripped_spaces"])
    return TokenTexts(spelling, head["bos_token"], head["eos_token"])
