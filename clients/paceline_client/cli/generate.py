"""`paceline generate`: one prompt, one answer on stdout."""

import dataclasses
import sys
import time
from typing import Annotated

import typer

from paceline_client.cli.client import cli_client
from paceline_client.cli.config import DEFAULT_TARGET, TargetOption
from paceline_client.cli.failures import reported
from paceline_client.cli.options import (
    MaxTokensOption,
    MinPOption,
    SeedOption,
    ServedModelOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_of,
)
from paceline_client.cli.output import echo_json
from paceline_client.cli.stopwatch import Stopwatch
from paceline_client.requests import Message, Stopping, invalid
from paceline_client.results import Result
from paceline_client.sync_client import Stream

_MAX_STDIN_BYTES = 4 * 1024 * 1024


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from stdin, without its last newline.")
    ],
    is_chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Ask through the model's chat template, or continue the text as it is.")
    ] = True,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    model: ServedModelOption = None,
    target: TargetOption = DEFAULT_TARGET,
) -> None:
    """Ask one question and stream the answer to stdout."""
    with reported(), cli_client(target) as client:
        text = read_stdin() if prompt == "-" else prompt
        messages = [*([Message("system", system)] if system else []), Message("user", text)]
        stopwatch = Stopwatch(time.monotonic)
        with client.stream(
            None if is_chat else text,
            messages=messages if is_chat else None,
            sampling=sampling_of(temperature, top_p, top_k, min_p, seed),
            stopping=Stopping(max_tokens=max_tokens, stop=stop),
            model=model,
        ) as stream:
            write_answer(stream, stopwatch, is_shown=not as_json)
        if as_json:
            echo_json(result_fields(stream.result, stopwatch))
        elif sys.stderr.isatty():
            typer.secho(f"{stream.result.usage.num_output_tokens} tokens, {stopwatch.summary()}", err=True, dim=True)


def read_stdin() -> str:
    """What was piped in. `InvalidRequestError` when it is not UTF-8 or too long."""
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise invalid("stdin", f"more than {_MAX_STDIN_BYTES} bytes")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise invalid("stdin", f"not UTF-8 at byte {error.start}") from None


def write_answer(stream: Stream, stopwatch: Stopwatch, *, is_shown: bool) -> None:
    """Read the stream to its end, printing the text as it comes, with a newline at the end."""
    ends_line = True
    for delta in stream:
        stopwatch.tokens_arrived(len(delta.token_ids))
        if is_shown and delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            ends_line = delta.text.endswith("\n")
    if is_shown and not ends_line:
        typer.echo()


def result_fields(result: Result, stopwatch: Stopwatch) -> dict[str, object]:
    """A result for programs: its own fields and how fast it came."""
    fields = dataclasses.asdict(result)
    if not result.logprobs:
        del fields["logprobs"]
    return {
        **fields,
        "time_to_first_token_seconds": stopwatch.time_to_first_token_seconds,
        "tokens_per_second": stopwatch.tokens_per_second,
    }
