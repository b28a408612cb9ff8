"""`paceline generate`: one prompt, one answer on stdout."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli import options
from paceline_cli.answer_bound import ask_bounded, tell_if_met
from paceline_cli.answer_parts import ShownParts
from paceline_cli.client import cli_client
from paceline_cli.config import DEFAULT_TARGET, TargetOption
from paceline_cli.failures import reported
from paceline_cli.output import echo_json
from paceline_cli.stopwatch import Stopwatch
from paceline_cli.waiting import WaitingNotice
from paceline_client.errors import PacelineError
from paceline_client.forms import Choice, Form, JsonObject, JsonSchema, Regex
from paceline_client.requests import Message, Output, Sampling, Scheduling, Stopping, invalid
from paceline_client.results import Completion, Result
from paceline_client.sync_client import Stream

PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="What to ask. Without it, or as -, it is what is piped in, without its last newline.",
    ),
]
JsonSchemaOption = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="Answer JSON that is valid against this.")
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="Answer what this pattern matches as a whole.")
]
_MAX_STDIN_BYTES = 4 * 1024 * 1024


@options.takes_sampling
def generate(
    prompt: PromptArgument = None,
    is_chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Ask through the model's chat template, or continue the text as it is.")
    ] = True,
    system: options.SystemOption = None,
    max_tokens: options.AnswerTokensOption = None,
    min_tokens: options.MinTokensOption = None,
    *,
    sampling: Sampling,
    stop: options.StopOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", metavar="TEXT", help="Answer this. May be given several times.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer an object of JSON.")] = False,
    tools: options.ToolsOption = None,
    template_argument: options.TemplateArgumentOption = None,
    num_completions: options.NumCompletionsOption = None,
    logprobs: options.LogprobsOption = None,
    timeout: options.RequestTimeoutOption = None,
    max_outage: options.MaxOutageOption = None,
    priority: options.PriorityOption = None,
    max_draft_tokens: options.MaxNumDraftTokensOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    model: options.ServedModelOption = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: options.TlsDirOption = None,
    token_file: options.TokenFileOption = None,
) -> None:
    """Ask one question and stream the answer to stdout."""
    with reported(), cli_client(target, tls_dir, token_file, max_outage) as client:
        text, structured = read_prompt(prompt), form_of(json_schema, regex, choice, json_object)
        shown, arguments = options.tools_of(tools), options.template_arguments_of(template_argument)
        stopwatch = Stopwatch(time.monotonic)

        def ask(most: int | None) -> Result:
            stream = client.stream(
                None if is_chat else text,
                messages=as_chat(text, system) if is_chat else None,
                sampling=dataclasses.replace(sampling, n=num_completions),
                stopping=Stopping(max_tokens=most, min_tokens=min_tokens, stop=stop),
                output=Output(logprobs=logprobs, parts=is_chat or None),
                scheduling=Scheduling(priority=priority, max_num_draft_tokens=max_draft_tokens),
                structured=structured,
                tools=shown,
                template_arguments=arguments,
                model=model,
                timeout=options.timeout_of(timeout),
            )
            with stream, WaitingNotice(client, stream) as notice:
                # Answers that come side by side can only be read one after another.
                is_shown = not as_json and num_completions in (None, 1)
                write_answer(stream, stopwatch, notice, is_shown=is_shown, has_parts=is_chat)
            return stream.result

        result = ask_bounded(max_tokens, ask)
        show_end(result, stopwatch, as_json=as_json)
        tell_if_met(result, max_tokens)


def as_chat(text: str, system: str | None) -> list[Message]:
    """An empty system text takes the place of the model's own."""
    return [*([] if system is None else [Message("system", system)]), Message("user", text)]


def form_of(json_schema: Path | None, regex: str | None, choice: list[str] | None, json_object: bool) -> Form | None:
    forms: list[Form] = []
    if json_schema is not None:
        forms.append(JsonSchema(options.read_text_file(json_schema, "--json-schema")))
    if regex is not None:
        forms.append(Regex(regex))
    if choice:
        forms.append(Choice(choice))
    if json_object:
        forms.append(JsonObject())
    if len(forms) > 1:
        raise typer.BadParameter("give one form of the answer", param_hint="--json-schema, --regex, --choice")
    return forms[0] if forms else None


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, or what was piped in where there is none, or only a dash."""
    if prompt is not None:
        return read_stdin() if prompt == "-" else prompt
    if not sys.stdin.isatty() and (text := read_stdin()):
        return text
    raise typer.BadParameter("write it behind the command, or pipe it in", param_hint="PROMPT")


def read_stdin() -> str:
    """What was piped in. `InvalidRequestError` when it is not UTF-8 or too long."""
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise invalid("stdin", f"more than {_MAX_STDIN_BYTES} bytes")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise invalid("stdin", f"not UTF-8 at byte {error.start}") from None


def write_answer(
    stream: Stream, stopwatch: Stopwatch, notice: WaitingNotice, *, is_shown: bool, has_parts: bool
) -> None:
    """Read the stream to its end, printing the text as it comes. A newline ends it, also where an error does."""
    ends_line, parts = True, ShownParts()
    try:
        for delta in stream:
            notice.heard()
            stopwatch.tokens_arrived(len(delta.token_ids))
            text = parts.text_of(delta.parts) if is_shown and has_parts else delta.text
            if is_shown and text:
                ends_line = text.endswith("\n")
                sys.stdout.write(text)
                sys.stdout.flush()
    except (PacelineError, KeyboardInterrupt):
        if not ends_line:
            typer.echo()
        raise
    if not ends_line:
        typer.echo()


def show_end(result: Result, stopwatch: Stopwatch, *, as_json: bool) -> None:
    if as_json:
        echo_json(result_fields(result, stopwatch))
        return
    if len(result.completions) > 1:
        for completion in result.completions:
            typer.echo(f"[{completion.index + 1}]\n{completion.text.rstrip()}")
    if sys.stderr.isatty():
        num_tokens = sum(completion.usage.num_output_tokens for completion in result.completions)
        typer.secho(f"{num_tokens} tokens, {stopwatch.summary()}", err=True, dim=True)


def result_fields(result: Result, stopwatch: Stopwatch) -> dict[str, object]:
    """A result for programs: the fields of its first completion, all of several, and how fast they came."""
    completions = [completion_fields(completion) for completion in result.completions]
    first = {name: value for name, value in completions[0].items() if name != "index"}
    return {
        "request_id": result.request_id,
        **first,
        **({"completions": completions} if len(completions) > 1 else {}),
        "time_to_first_token_seconds": stopwatch.time_to_first_token_seconds,
        "tokens_per_second": stopwatch.tokens_per_second,
    }


def completion_fields(completion: Completion) -> dict[str, object]:
    """A completion for programs; log-probabilities and parts beside text only where there are any."""
    fields = dataclasses.asdict(completion)
    if not completion.logprobs:
        del fields["logprobs"]
    if not (completion.reasoning or completion.tool_calls):
        for name in ("content", "reasoning", "tool_calls"):
            del fields[name]
    return fields
