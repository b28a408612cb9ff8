"""The form that executors hold an output to: what a request says of its output and of calls of tools, as one grammar.

A function of the request, its prompt's tokens and the model's files alone.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from paceline.forms.grammar import Grammar, grammar_of
from paceline.plan.values import Int32Array
from paceline.v1.inference_pb2 import TOOL_CHOICE_MODE_NONE, TOOL_CHOICE_MODE_REQUIRED, Chat, Tool
from paceline.v1.sampling_pb2 import StructuredOutput
from paceline_scheduler.api.text.detokenizer import Spelling
from paceline_scheduler.api.text.parts.bound import OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.parts.grammar import CallsForm, ToolForm, unheld_keyword, write_grammar
from paceline_scheduler.api.text.parts.style import CallStyle
from paceline_scheduler.errors import InvalidFormError, InvalidRequestError, UnsupportedError

MAX_BYTES = 128 * 1024  # of the whole grammar, which every placement of the request carries
_ANY_OBJECT = '{"type":"object"}'

Check = Callable[[bytes], Awaitable[None]]
"""Of a serialised StructuredOutput; raises InvalidFormError."""
Compute = Callable[[int, Callable[[], str]], Awaitable[str]]
"""Does work on so many characters, off the event loop if that takes long; raises QueueFullError."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How a model writes: `style` is None where calls cannot be asked for."""

    output_format: OutputFormat
    style: CallStyle | None
    spelling: Spelling

    def shown_tokens(self) -> list[str]:
        """Added tokens that are part of an output's text."""
        shown = self.spelling.token_bytes_without_special
        return [text for token_id, text in self.spelling.added.items() if shown[token_id]]


def binds_calls(chat: Chat) -> bool:
    """Whether more is said of calls than that there may be some."""
    choice = chat.tool_choice
    if choice.mode == TOOL_CHOICE_MODE_NONE or not chat.tools:
        return False
    is_bound = choice.mode == TOOL_CHOICE_MODE_REQUIRED or bool(choice.name)
    is_single = choice.HasField("parallel_calls") and not choice.parallel_calls
    return is_bound or is_single or any(tool.strict for tool in chat.tools)


async def output_form(
    chat: Chat, structured: bytes, prompt_token_ids: Int32Array, writing: Writing, check: Check, compute: Compute
) -> bytes:
    """Serialised; empty: none. `structured` is the request's own, which was checked. Raises InvalidRequestError and
    UnsupportedError, each naming the field, and QueueFullError.
    """
    asked = StructuredOutput.FromString(structured)
    is_bound, may_call = binds_calls(chat), bool(chat.tools) and chat.tool_choice.mode != TOOL_CHOICE_MODE_NONE
    is_behind_reasoning = writing.output_format.has_reasoning and not asked.in_reasoning
    if not is_bound and not (structured and (is_behind_reasoning or may_call)):
        return structured
    calls = await _calls(chat, writing, check) if is_bound or may_call else None
    turn = PartCutter(writing.output_format, Wanted("", 0, {}))
    turn.begin(prompt_token_ids, writing.spelling)
    num_chars = len(structured) + sum(len(tool.schema) for tool in (calls.tools if calls else ()))
    grammar = await compute(num_chars, lambda: _grammar(asked, calls, writing, is_reasoning=turn.is_reasoning))
    if len(grammar) > MAX_BYTES:
        sentence = f"need a grammar of {len(grammar)} bytes, at most {MAX_BYTES} are taken"
        raise InvalidRequestError("chat.tools" if calls else "structured", sentence)
    return StructuredOutput(composed=grammar).SerializeToString(deterministic=True)


def _grammar(asked: StructuredOutput, calls: CallsForm | None, writing: Writing, *, is_reasoning: bool) -> str:
    answer: Sequence[Grammar] = ()
    if asked.WhichOneof("constraint") is not None and not (calls and calls.is_required):
        answer = json.loads(grammar_of(asked, writing.shown_tokens()))["grammars"]
    return write_grammar(writing.output_format.template, calls, answer, is_reasoning=is_reasoning)


async def _calls(chat: Chat, writing: Writing, check: Check) -> CallsForm:
    choice, tools = chat.tool_choice, list(enumerate(chat.tools))
    if writing.style is None:
        raise UnsupportedError("chat.tool_choice", "the model's chat template does not show how its calls are written")
    if choice.name:
        tools = [(index, tool) for index, tool in tools if tool.name == choice.name]
    return CallsForm(
        tools=[
            ToolForm(tool.name, await _schema(tool, f"chat.tools[{index}]", writing, check)) for index, tool in tools
        ],
        style=writing.style,
        is_required=choice.mode == TOOL_CHOICE_MODE_REQUIRED or bool(choice.name),
        is_parallel=choice.parallel_calls or not choice.HasField("parallel_calls"),
    )


async def _schema(tool: Tool, place: str, writing: Writing, check: Check) -> str:
    """What the arguments are held to: of a tool that is not strict any object, where its schema cannot be."""
    schema = tool.parameters_json_schema or '{"type":"object","properties":{},"additionalProperties":false}'
    try:
        await check(StructuredOutput(json_schema=schema).SerializeToString(deterministic=True))
    except InvalidFormError as error:
        if not tool.strict:
            return _ANY_OBJECT
        field = error.field.replace("structured.json_schema", f"{place}.parameters_json_schema")
        raise InvalidFormError(error.reason, field, error.message) from None
    keyword = unheld_keyword(writing.output_format.template, schema)
    if keyword and tool.strict:
        sentence = f"the model writes arguments in a form of its own, which cannot be held to {keyword}"
        raise UnsupportedError(f"{place}.strict", f"{sentence}; leave strict unset")
    return schema
