"""The process in which a foreign tokenizer is tried, and encodes if it must not do so elsewhere:
`python -m paceline_scheduler.api.text.tokenizer_worker`.

It is set up with all that `TokenizerSource` says for encoding and the vocabulary's size, and its JSON. Asked with
{method, arguments} of a TextModel it answers {result} or {refused: [field, sentence]}; without a method it answers
what tokens spell and whether it may encode elsewhere, as `spelling_file` has it.
"""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.plan.plain_tokenizer import is_plain
from paceline.plan.sampling import GenerationDefaults
from paceline_scheduler.api.text.confined_worker import Message, SetupFailedError, Work, printable, serve
from paceline_scheduler.api.text.spelling_file import pack
from paceline_scheduler.api.text.tokenizer import TextModel, read_text_model
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError

_NOTHING = TokenizerSource("", b"", None, None, None, (), (), (), (), GenerationDefaults())
_METHODS = {
    each.__name__: each
    for each in (TextModel.encode_text, TextModel.encode_rendered_chat, TextModel.marked, TextModel.ways_to_spell)
}
_SAMPLE = "Hello, W\u00f6rld 123\n\t \u2603"


def _set_up(setup: dict[str, Any], data: bytes) -> Work:
    try:
        model = read_text_model(replace(_NOTHING, json=data, **setup["source"]), setup["vocab_size"])
    except UnsupportedError as error:
        raise SetupFailedError(str(error)) from error
    with suppress(InvalidRequestError):  # some have no word for what is in it
        model.encode_text(_SAMPLE)

    def work(question: dict[str, Any], _: bytes) -> Message:
        if "method" not in question:
            return {}, pack(replace(model.texts, is_plain=is_plain(data)))
        try:
            result = _METHODS[question["method"]](model, *question["arguments"])
        except InvalidRequestError as error:
            return {"refused": [error.field, printable(error.message)]}, b""
        return {"result": result.tolist() if isinstance(result, np.ndarray) else result}, b""

    return work


if __name__ == "__main__":
    # A thread for each core would take address space. The library alone reads this.
    os.putenv("RAYON_NUM_THREADS", "1")  # noqa: TID251
    serve(_set_up)
