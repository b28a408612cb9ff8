"""Chats rendered through a model's template, by a confined process of its own for each template.

`chat_worker` knows what a template may do there.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.confined import Confined, ConfinedError, Confinement
from paceline_scheduler.api.text.conversations import TemplateInput
from paceline_scheduler.errors import InvalidRequestError, QueueFullError

_MAX_RENDERERS = 8
_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Equal sources share a process."""

    template: str
    special_tokens: tuple[tuple[str, str], ...]  # names and texts


class ChatRenderers:
    """The least recently used ones are ended."""

    def __init__(
        self, limits: EdgeLimits, local_time: Callable[[], datetime], confinement: Confinement | None = None
    ) -> None:
        self._max_num_waiting = limits.max_num_waiting_texts
        self._confinement = confinement or Confinement()
        self._local_time = local_time
        self._num_waiting = 0
        self._renderers: OrderedDict[TemplateSource, Confined] = OrderedDict()

    async def render(self, source: TemplateSource, conversation: TemplateInput, max_chars: int) -> str:
        """Raises InvalidRequestError naming `chat` or a part of it when the template refuses, fails, takes too long or
        does not read what it is given, or QueueFullError.
        """
        if self._num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{self._num_waiting} chats wait to be rendered, which is the limit; try again", _RETRY_AFTER_S
            )
        self._num_waiting += 1
        try:
            renderer = await self._renderer(source)
            question = {**conversation, "now": self._local_time().isoformat(), "max_chars": max_chars}
            answer, _ = await renderer.ask(question)
        except ConfinedError as error:
            raise _failed(str(error)) from None
        finally:
            self._num_waiting -= 1
        return _text_of(answer)

    async def close(self) -> None:
        renderers = list(self._renderers.values())
        self._renderers.clear()
        for renderer in renderers:
            await renderer.close()

    async def _renderer(self, source: TemplateSource) -> Confined:
        renderer = self._renderers.get(source)
        if renderer is None:
            setup = {"template": source.template, "constants": dict(source.special_tokens)}
            module = "paceline_scheduler.api.text.chat_worker"
            renderer = self._renderers[source] = Confined(module, "render chats", setup, b"", self._confinement)
        self._renderers.move_to_end(source)
        if len(self._renderers) > _MAX_RENDERERS:
            _, unused = self._renderers.popitem(last=False)
            await unused.close()
        return renderer


def _text_of(answer: dict[str, str]) -> str:
    if "unread" in answer:
        raise InvalidRequestError(f"chat.{answer['unread']}", answer["sentence"])
    if "refused" in answer:
        raise InvalidRequestError("chat.messages", f"the model's chat template says: {answer['refused']}")
    if "failed" in answer:
        raise _failed(answer["failed"])
    return answer["text"]


def _failed(why: str) -> InvalidRequestError:
    return InvalidRequestError("chat", f"the model's chat template fails: {why}; send text instead")
