"""What the answers of all endpoints have in common."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline_client import FinishReason, RequestCancelledError, Result

DONE = b"data: [DONE]\n\n"
FINISH_REASONS = {FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"'}
_encode = msgspec.json.Encoder().encode
# Lines of events end at these for readers that split text as Python does.
_LINE_ENDS = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")


def encoded(value: object) -> bytes:
    """As JSON that fits in one line, however its reader finds lines."""
    content = _encode(value)
    return content if content.isascii() else _LINE_ENDS.sub(_escape, content)


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Of the prompts, each counted once whatever `n` is, and of all completions."""
    num_prompt = sum(result.usage.num_prompt_tokens for result in results)
    outputs = [completion.usage for result in results for completion in result.completions]
    num_output = sum(output.num_output_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.num_cached_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": sum(output.num_reasoning_tokens for output in outputs)},
    }


def finish_reason(reason: FinishReason) -> bytes:
    """As JSON. `RequestCancelledError`: an output that somebody cut claims no success."""
    if reason is FinishReason.CANCELLED:
        raise RequestCancelledError("the request was cancelled, with its id, before its output was complete")
    return FINISH_REASONS[reason]
