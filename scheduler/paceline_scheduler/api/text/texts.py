"""Prompts to tokens and tokens to text, for any model that is served.

The one place that joins tokenizers, chat templates, forms and parts of outputs, and their bounds.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from paceline.forms.library import LIBRARY
from paceline.plan.values import Int32Array
from paceline.v1 import inference_pb2
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.rules import Prompt, check_prompt_length, check_token_ids
from paceline_scheduler.api.text.chat_renderer import ChatRenderers, TemplateSource
from paceline_scheduler.api.text.confined import Confinement
from paceline_scheduler.api.text.conversations import TemplateInput, template_input
from paceline_scheduler.api.text.forms import Forms
from paceline_scheduler.api.text.output_forms import Writing, binds_calls, output_form
from paceline_scheduler.api.text.parts.bound import OutputFormat
from paceline_scheduler.api.text.parts.formats import OutputFormats, PartsSupport
from paceline_scheduler.api.text.parts.table import TEXT_ALONE
from paceline_scheduler.api.text.tokenizer import TextModel, TextModels, TextThreads, Trial, try_confined
from paceline_scheduler.backend import ServedModel, TokenizerSource
from paceline_scheduler.disk_cache import AsyncDiskCache
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError

_T = TypeVar("_T")
_NO_TOKENS = np.zeros(0, dtype=np.int32)
_MAX_INLINE_TOKENS = 4096
_MAX_TRIAL_CHARS = 1 << 18
MAX_BAD_WORD_TOKENS = 8192  # what executors take
NUM_WAYS_TO_SPELL = 3  # of each bad word, at most


class Texts:
    """Templates are told `local_time`.

    `cache` keeps on disk what tokens spell. `is_at_rest`, `trial`: see `TextModels`.
    """

    def __init__(
        self,
        limits: EdgeLimits,
        local_time: Callable[[], datetime],
        confinement: Confinement | None = None,
        cache: AsyncDiskCache | None = None,
        is_at_rest: Callable[[], bool] = lambda: True,
        trial: Trial = try_confined,
    ) -> None:
        self._limits = limits
        self._threads = TextThreads(limits)
        self._models = TextModels(self._threads, cache or AsyncDiskCache(), is_at_rest, trial)
        self._chats = ChatRenderers(limits, local_time, confinement)
        self._formats = OutputFormats()
        self._trying: set[asyncio.Task[PartsSupport]] = set()
        self.forms = Forms(limits)

    async def prepare(self, source: TokenizerSource, vocab_size: int) -> None:
        """Building it blocks everything else. Nobody waits for the trial of its calls. Raises UnsupportedError."""
        text_model = await self._models.get(source, vocab_size)
        if self.format_name(source) != TEXT_ALONE:
            trial = asyncio.ensure_future(self._support(source, text_model))
            self._trying.add(trial)
            trial.add_done_callback(self._end_trial)

    async def model(self, model: ServedModel) -> TextModel:
        """Raises UnsupportedError."""
        return await self._models.get(model.tokenizer, model.vocab_size)

    def format_name(self, source: TokenizerSource) -> str:
        """Of what outputs of its model are cut by."""
        return self._formats.name(source)

    def output_format(self, model: ServedModel, text_model: TextModel, name: str) -> OutputFormat:
        """Raises UnsupportedError for one of another release."""
        return self._formats.format(model.tokenizer, text_model.spelling, name)

    async def parts_support(self, model: ServedModel) -> PartsSupport:
        """Raises UnsupportedError and QueueFullError."""
        return await self._support(model.tokenizer, await self.model(model))

    async def require_tools(self, names: Sequence[str], model: ServedModel) -> None:
        """Raises InvalidRequestError for a name that the model cannot write, UnsupportedError and QueueFullError."""
        if why := (await self.parts_support(model)).why_no_tools:
            raise UnsupportedError("chat.tools", f"the model {model.name!r} takes no tools: {why}")
        call = self.output_format(model, await self.model(model), self.format_name(model.tokenizer)).template.call
        if call is None or not call.has_plain_names:
            return
        for index, name in enumerate(names):
            if not name.replace("_", "a").isalnum():
                sentence = f"is {name!r}; the model writes names of letters, digits and underscores alone"
                raise InvalidRequestError(f"chat.tools[{index}].name", sentence)

    async def output_form(
        self, chat: inference_pb2.Chat, structured: bytes, prompt_token_ids: Int32Array, model: ServedModel
    ) -> bytes:
        """See `output_forms`; `structured` is the request's own. Raises InvalidRequestError, UnsupportedError and
        QueueFullError.
        """
        if not (structured or binds_calls(chat)):
            return b""
        if not structured and model.structured_output != LIBRARY:
            sentence = f"no executor of the model {model.name!r} holds outputs to a form, as this takes; upgrade them"
            raise UnsupportedError("chat.tool_choice", sentence)
        if structured:
            await self.forms.check(structured)
        text_model, support = await self.model(model), await self.parts_support(model)
        output_format = self.output_format(model, text_model, self.format_name(model.tokenizer))
        writing = Writing(output_format, support.style, text_model.spelling)
        return await output_form(chat, structured, prompt_token_ids, writing, self.forms.check, self._compute)

    async def token_ids(self, prompt: Prompt, model: ServedModel) -> Int32Array:
        """Raises InvalidRequestError for too many, and QueueFullError."""
        if isinstance(prompt, inference_pb2.GenerateRequest) and prompt.HasField("token_ids"):
            given = prompt.token_ids.ids
            token_ids = np.fromiter(given, dtype=np.int32, count=len(given))
            check_token_ids("token_ids.ids", token_ids, model.vocab_size)
        else:
            text_model = await self._models.get_for_prompt(model.tokenizer, model.vocab_size)
            if prompt.HasField("chat"):
                conversation = template_input(prompt.chat, model.tokenizer.default_system_text)
                conversation, mark = await self._ask(text_model, 0, TextModel.marked, conversation)
                rendered = await self._render(conversation, text_model, model)
                encoded = await self._ask(text_model, len(rendered), TextModel.encode_rendered_chat, rendered, mark)
            else:
                encoded = await self._ask(text_model, len(prompt.text), TextModel.encode_text, prompt.text)
            token_ids = np.asarray(encoded, dtype=np.int32)
        check_prompt_length(len(token_ids), model)
        return token_ids

    async def bad_word_token_ids(self, words: tuple[str, ...], model: ServedModel) -> tuple[tuple[int, ...], ...]:
        """A word is spelt at the beginning of a text, after a space, and after another character. The same letters in
        another case or cut otherwise are not found. Raises InvalidRequestError, QueueFullError.
        """
        bare = [word.lstrip(" ") or word for word in words]
        text_model = await self._models.get_for_prompt(model.tokenizer, model.vocab_size)
        num_chars = NUM_WAYS_TO_SPELL * sum(map(len, bare))
        spelt = await self._ask(text_model, num_chars, TextModel.ways_to_spell, bare)
        num_tokens = sum(map(len, spelt))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            sentence = f"take {num_tokens} tokens to spell, at most {MAX_BAD_WORD_TOKENS} are allowed; name fewer"
            raise InvalidRequestError("sampling.bad_words", sentence)
        return tuple(map(tuple, spelt))

    async def decode(
        self, token_ids: Int32Array, model: ServedModel, skip_special_tokens: bool, before: Int32Array = _NO_TOKENS
    ) -> str:
        """Raises InvalidRequestError."""
        check_token_ids("token_ids", token_ids, model.vocab_size)
        check_token_ids("preceding_token_ids", before, model.vocab_size)
        spelling = (await self.model(model)).spelling
        decode = partial(spelling.decode, token_ids.tolist(), skip_special_tokens, before.tolist())
        return decode() if len(token_ids) <= _MAX_INLINE_TOKENS else await self._threads.run(decode)

    async def token_texts(self, token_ids: Int32Array, model: ServedModel) -> list[str]:
        text_model = await self.model(model)
        return await self._threads.run(lambda: [text_model.text_of(token_id) for token_id in token_ids.tolist()])

    async def close(self) -> None:
        for trial in self._trying:
            trial.cancel()
        await self._formats.close()
        await self._models.close()
        self._threads.close()
        await self._chats.close()
        await self.forms.close()

    async def _ask(self, model: TextModel, num_chars: int, method: Callable[..., _T], *arguments: object) -> _T:
        """Have a method run where the model's tokenizer may run, and off the event loop if it takes long."""
        if model.confined is not None:
            with self._threads.turn():
                return cast("_T", await model.ask_confined(method.__name__, arguments))
        return await self._compute(num_chars, partial(method, model, *arguments))

    async def _compute(self, num_chars: int, work: Callable[[], _T]) -> _T:
        """Off the event loop if it takes long. Raises QueueFullError."""
        return work() if num_chars <= self._limits.max_inline_chars else await self._threads.run(work)

    async def _support(self, source: TokenizerSource, text_model: TextModel) -> PartsSupport:
        async def render(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
            template = TemplateSource(source.template_for(has_tools=True) or "", text_model.special_tokens)
            question = TemplateInput(messages=list(map(dict, messages)), variables=dict(variables))
            return await self._chats.render(template, question, _MAX_TRIAL_CHARS)

        return await self._formats.support(source, text_model.spelling, render)

    def _end_trial(self, trial: "asyncio.Task[PartsSupport]") -> None:
        self._trying.discard(trial)
        if not trial.cancelled():
            trial.exception()  # whoever needs it tries again

    async def _render(self, conversation: TemplateInput, text_model: TextModel, model: ServedModel) -> str:
        template = model.tokenizer.template_for(has_tools=bool(conversation["variables"]["tools"]))
        assert template is not None, "checked before"
        source = TemplateSource(template, text_model.special_tokens)
        # A template may repeat its input once.
        return await self._chats.render(source, conversation, 2 * self._limits.max_prompt_chars(model.max_model_len))
