"""The process that renders one model's chats: `python -m paceline_scheduler.api.text.chat_worker`.

A template can loop for ever, eat memory or crash the interpreter. The process is set up with {template, constants} and
asked with {messages, variables, now, max_chars}, answered by {text}, {refused}, {failed} or {unread, sentence}.
"""

from datetime import datetime
from typing import Any

from paceline.chat_template import ChatRefusedError, ChatTemplate, TemplateFailedError, UnreadError
from paceline_scheduler.api.text.confined_worker import Message, SetupFailedError, Work, printable, serve


def _set_up(setup: dict[str, Any], _: bytes) -> Work:
    try:
        template = ChatTemplate(setup["template"], setup["constants"])
    except TemplateFailedError as error:
        raise SetupFailedError(str(error)) from error

    def work(question: dict[str, Any], _: bytes) -> Message:
        return _answer(template, question), b""

    return work


def _answer(template: ChatTemplate, question: dict[str, Any]) -> dict[str, str]:
    try:
        now = datetime.fromisoformat(question["now"])
        text = template.render(question["messages"], now, question["max_chars"], question["variables"])
        text.encode()  # half a surrogate pair has no place in a prompt
    except ChatRefusedError as error:
        return {"refused": printable(error)}
    except UnreadError as error:
        return {"unread": error.part, "sentence": str(error)}
    except TemplateFailedError as error:
        return {"failed": printable(error)}
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except UnicodeEncodeError:
        return {"failed": "it renders half a surrogate pair"}
    return {"text": text}


if __name__ == "__main__":
    serve(_set_up)
