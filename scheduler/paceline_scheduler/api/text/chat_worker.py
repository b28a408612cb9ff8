"""The process that renders one model's chats: `python -m paceline_scheduler.api.text.chat_worker`.

A template can loop for ever, eat memory or crash the interpreter. So the process has little memory, writes no files and
ends itself when one chat takes too long; `chat_renderer` replaces it.

Messages both ways are JSON after a length of four bytes. First comes {template, constants, max_render_s, max_bytes},
answered by {} or {failed}; then {messages, now, max_chars}, answered by {text}, {refused} or {failed}. The end of its
input ends the process.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO

from paceline_scheduler.api.text.chat_template import ChatRefusedError, ChatTemplate, TemplateFailedError

_LENGTH_BYTES = 4


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(requests)
    if setup is None:
        return
    _confine(setup["max_bytes"])
    signal.setitimer(signal.ITIMER_REAL, setup["max_render_s"])
    try:
        template = ChatTemplate(setup["template"], setup["constants"])
    except (TemplateFailedError, MemoryError) as error:
        _write(replies, {"failed": _printable(error) or "it needs too much memory"})
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write(replies, {})
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, setup["max_render_s"])
        reply = _reply(template, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)


def _reply(template: ChatTemplate, request: dict[str, Any]) -> dict[str, str]:
    try:
        now = datetime.fromisoformat(request["now"])
        text = template.render(request["messages"], now, request["max_chars"])
        text.encode()  # half a surrogate pair has no place in a prompt
    except ChatRefusedError as error:
        return {"refused": _printable(error)}
    except TemplateFailedError as error:
        return {"failed": _printable(error)}
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except UnicodeEncodeError:
        return {"failed": "it renders half a surrogate pair"}
    return {"text": text}


def _printable(error: Exception) -> str:
    """It may quote the template: be long, or hold half a surrogate pair."""
    return str(error)[:500].encode("utf-8", "replace").decode()


def _confine(max_bytes: int) -> None:
    """The timer's signal stays: it ends the process even inside C."""
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    message: dict[str, Any] = json.loads(stream.read(int.from_bytes(length, "big")))
    return message


def _write(stream: BinaryIO, message: dict[str, str]) -> None:
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


if __name__ == "__main__":
    main()
