"""Texts of users and models: chats, templates, traces, files of tokens, options that are JSON, files of a cache."""

import argparse
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from importlib.resources import files
from types import FrameType
from typing import NoReturn

from google.protobuf.message import DecodeError

from edge_rig.tokenizers import CHAT_TEMPLATE, byte_level_tokenizer
from fuzzing.target import Target, scratch, tokenizer
from paceline.chat_template import ChatRefusedError, ChatTemplate, TemplateFailedError
from paceline.forms.compiling import check_form
from paceline.forms.errors import FormError
from paceline.v1.inference_pb2 import Chat, ChatMessage
from paceline.v1.sampling_pb2 import StructuredOutput, Tag, Tags
from paceline_cli.bench.errors import TraceError
from paceline_cli.bench.traces import Scale, read_trace, replay
from paceline_cli.supervisor.log_lines import Level, parse_line
from paceline_scheduler.access.tokens import parse_tokens
from paceline_scheduler.api.text.conversations import check_chat, template_input
from paceline_scheduler.api.text.parts.bound import BoundTemplate, OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.parts.template import TemplateError, read_template
from paceline_scheduler.api.text.special_texts import SpecialTexts
from paceline_scheduler.api.text.spelling_file import TokenTexts, pack, unpack
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.config import read_speculation
from paceline_scheduler.errors import InvalidRequestError, TokenFileError, UnsupportedError

_NOON = datetime(2026, 11, 21, 12, 0)  # noqa: DTZ001 - templates are told the local time
_MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": ""}]
_RENDER_S = 1.0
_VOCAB_SIZE = 400


class _OutOfTimeError(BaseException):
    """What ends a template here; in a scheduler its process ends."""


@contextmanager
def _bounded() -> Iterator[None]:
    """End what runs on for too long, by the time that it computes."""

    def end(_: int, __: FrameType | None) -> NoReturn:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def render(data: bytes) -> None:
    """Be the process that renders a template. What makes one number of two, or a text longer, is left out: to endure
    that is for the process's bounds, which this one has not.
    """
    source = data.decode("utf-8", "replace")
    if "*" in source or any(word in source for word in ("lipsum", "center", "indent", "format", "%", "<<", "range")):
        source = "".join("7" if letter.isdecimal() else letter for letter in source.replace("*", "+"))
        source = _without_widths(source)
    with suppress(ChatRefusedError, TemplateFailedError, MemoryError, _OutOfTimeError), _bounded():
        template = ChatTemplate(source, {"bos_token": "<s>"})
        template.render(_MESSAGES, _NOON, 10_000)


def _without_widths(source: str) -> str:
    """Return the source with no number of more than one digit."""
    kept: list[str] = []
    for letter in source:
        if not (letter in "0123456789_" and kept and kept[-1] in "0123456789_" and letter != "_"):
            kept.append(letter)
    return "".join(kept)


def _sound_templates() -> Iterator[bytes]:
    yield CHAT_TEMPLATE.encode()
    yield (
        b"{%- set ns = namespace(found=false) -%}{%- for m in messages if m.role != 'system' -%}{%- if loop.first -%}"
        b"{{ bos_token }}{%- endif -%}{{ m['content'] | trim | tojson }}{%- if loop.index0 > 3 -%}{% break %}"
        b"{%- endif -%}{%- endfor -%}{{ strftime_now('%d %b') }}{% generation %}x{% endgeneration %}"
    )
    yield b"{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[-1].content[::-1]) }}{{ raise_exception('no') }}"


def _reads_trace(name: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        """Be the benchmark with this trace."""
        path = scratch() / name
        path.write_bytes(data)
        with suppress(TraceError):
            replay(read_trace(path, 50), Scale(0.125, 2.0))

    return read


_CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16T18:17:04Z,3,0\n"
_JSONL = (
    b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n',
    b'{"timestamp": 0.5, "input_length": 1, "output_length": 0}\n\n',
)


def read_tokens(data: bytes) -> None:
    """Be a scheduler with this file of tokens."""
    with suppress(TokenFileError, UnicodeDecodeError):  # the second is one of the file as a whole
        parse_tokens(data.decode())


def _sound_tokens() -> Iterator[bytes]:
    line = b'{"hash": "sha256:%s", "tenant": "blue", "role": "client", "name": "n", "limits": {"max_num_streams": 3}}\n'
    yield line % (b"ab" * 32) + line % (b"cd" * 32)


def read_option(data: bytes) -> None:
    """Be a scheduler with this option, and a supervisor that reads this line of a log."""
    text = "{" + data.decode("utf-8", "replace").replace("\0", "")
    with suppress(argparse.ArgumentTypeError):
        read_speculation(text)
    parse_line(data, Level.INFO)


_OPTIONS = (
    b'"max_num_draft_tokens": 4}',
    b'{"event": "loading", "fraction": 0.5, "phase": "weights", "level": "info"}',
    b'{"event": "draining", "num_requests": 3}',
)


def read_spelling(data: bytes) -> None:
    """Be a scheduler that finds this in its cache, or is answered it by the process that tried a tokenizer."""
    with suppress(ValueError):
        texts = unpack(data)
        if len(texts.spelling.token_bytes) > 2:
            texts.spelling.decode([1, 2], skip_special_tokens=True)


def _sound_spelling() -> Iterator[bytes]:
    texts = read_text_model(tokenizer(), _VOCAB_SIZE).texts
    yield pack(TokenTexts(texts.spelling, (("bos_token", "<s>"),)))


def check(data: bytes) -> None:
    """Be the process that checks the form of an output."""
    with suppress(DecodeError, FormError, _OutOfTimeError), _bounded():
        check_form(StructuredOutput.FromString(data))


def _sound_forms() -> Iterator[bytes]:
    schema = '{"$defs":{"a":{"type":"array","items":{"$ref":"#/$defs/a"}}},"properties":{"x":{"$ref":"#/$defs/a"}}}'
    yield StructuredOutput(json_schema=schema).SerializeToString()
    yield StructuredOutput(json_schema='{"type":"string","pattern":"^(a{2}|[^b]){3,}$"}').SerializeToString()
    yield StructuredOutput(regex=r"(?i)a{2,3}/[\]x]*\p{L}").SerializeToString()
    grammar = '%ignore / +/\nstart: a ["b"i] | %json {"enum":[1]} // c\na[lazy]: /x\\/{2}/ | "\\n"~3'
    yield StructuredOutput(grammar=grammar).SerializeToString()
    yield StructuredOutput(tags=Tags(tags=[Tag(begin="<a>", json_schema="{}", end="</a>")])).SerializeToString()


def read_chat(data: bytes) -> None:
    """Be a scheduler that is sent this chat: what it takes can be told to the process that renders it."""
    with suppress(DecodeError, InvalidRequestError, UnsupportedError):
        chat = Chat.FromString(data)
        if chat.messages:
            check_chat(chat)
            marked, _ = _special_texts().marked(template_input(chat, "Be brief."))
            json.dumps(marked, ensure_ascii=False).encode()


@cache
def _special_texts() -> SpecialTexts:
    return SpecialTexts(byte_level_tokenizer())


def _sound_chats() -> Iterator[bytes]:
    turns = ChatMessage(role="user", content="<|im_end|>"), ChatMessage(role="assistant", reasoning="hm")
    chat = Chat(messages=turns)
    chat.messages[1].tool_calls.add(id="1", name="clock", arguments='{"at": [1, {"x": "<|im_end|>"}]}')
    chat.tools.add(name="clock", description="now", parameters_json_schema='{"type": "object", "properties": {}}')
    chat.template_arguments["flag"].flag = True
    yield chat.SerializeToString()


def cut_parts(data: bytes) -> None:
    """Be a scheduler with a checkpoint that declares its marks, and a model that writes them."""
    source, _, output = data.partition(b"\0")
    try:
        template = read_template(source.decode("utf-8", "replace"))
    except TemplateError:
        return
    bound = BoundTemplate(template, {}, is_whole_turn=True)
    cutter = PartCutter(OutputFormat("", bound), Wanted("r1", 0, {"f": '{"properties": {"a": {"type": "integer"}}}'}))
    text = output.decode("utf-8", "replace")
    for start in range(0, len(text), 3):
        cutter.add(text[start : start + 3])
    cutter.finish()


def _sound_parts() -> Iterator[bytes]:
    calls = {
        "hermes-think@1": '<think>a</think><tool_call>{"name": "f", "arguments": {"a": "\\""}}</tool_call>',
        "qwen3-coder@1": "<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>",
        "mistral-list@1": '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": [], "name": "g"}]',
        "mistral-args@1": '[TOOL_CALLS]f[ARGS]{"a": {}}',
        "function-gemma@1": "<start_function_call>call:f{a:<escape>b<escape>,c:[1]}<end_function_call>",
    }
    folder = files("paceline_scheduler.api.text.parts") / "response_templates"
    for name, output in calls.items():
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        yield f"{json.dumps(content['response_template'])}\0{output}".encode()


TARGETS = (
    Target("chat", read_chat, _sound_chats),
    Target("parts", cut_parts, _sound_parts),
    Target("form", check, _sound_forms),
    Target("chat-template", render, _sound_templates),
    Target("trace-csv", _reads_trace("trace.csv"), lambda: (_CSV,)),
    Target("trace-jsonl", _reads_trace("trace.jsonl"), lambda: _JSONL),
    Target("tokens-file", read_tokens, _sound_tokens),
    Target("json-lines", read_option, lambda: _OPTIONS),
    Target("spelling-cache", read_spelling, _sound_spelling),
)
