"""`paceline explain` and `paceline estimate`: where a request is, and what would become of one."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli import options
from paceline_cli.client import cli_client
from paceline_cli.commands.generate import PromptArgument, as_chat, read_prompt
from paceline_cli.commands.replay import run_recording_tool
from paceline_cli.config import DEFAULT_TARGET, TargetOption
from paceline_cli.failures import describe, reported
from paceline_cli.output import echo_json
from paceline_cli.sentences import expectation, explained
from paceline_cli.waiting import WaitingNotice
from paceline_client.requests import Scheduling, Stopping
from paceline_client.results import Estimate

_RECORDING = ".recording"
_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def explain(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files of a recording, from the scheduler's --record-dir.",
            default_factory=list,
            show_default=False,
        ),
    ],
    what: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST|FILE",
            help="A request's id; behind files, how it begins will do. A file: list all requests in the files.",
        ),
    ],
    tenant: options.TenantOption = "",
    as_json: _JsonOption = False,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: options.TlsDirOption = None,
    token_file: options.TokenFileOption = None,
) -> None:
    """Say where a request is and what it waits for.

    With files of a recording, tell a request's whole story step by step.
    """
    is_file = what.endswith(_RECORDING) or Path(what).is_file()
    if (files or is_file) and (as_json or tenant):
        raise typer.BadParameter("--json and --tenant are for a request that a scheduler knows, not for files")
    if is_file:
        run_recording_tool("explain", *files, what)
    if files:
        run_recording_tool("explain", *files, "--request", what)
    with reported(), cli_client(target, tls_dir, token_file) as client:
        with WaitingNotice(client):
            explanation = client.explain(what, tenant=tenant)
        if as_json:
            echo_json(dataclasses.asdict(explanation))
        else:
            typer.echo(explained(explanation))


def estimate(
    prompt: PromptArgument = None,
    is_chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the model's chat template, or as it is.")
    ] = True,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = None,
    timeout: options.RequestTimeoutOption = None,
    priority: options.PriorityOption = None,
    as_json: _JsonOption = False,
    model: options.ServedModelOption = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: options.TlsDirOption = None,
    token_file: options.TokenFileOption = None,
) -> None:
    """Say how soon an answer would come. Nothing is run.

    A question that would be refused ends as if it had been asked: with the error, and its exit code.
    """
    with reported(), cli_client(target, tls_dir, token_file) as client:
        text = read_prompt(prompt)
        with WaitingNotice(client):
            expected = client.estimate(
                None if is_chat else text,
                messages=as_chat(text, system) if is_chat else None,
                stopping=Stopping(max_tokens=max_tokens),
                scheduling=Scheduling(priority=priority),
                model=model,
                timeout=options.timeout_of(timeout),
            )
        if as_json:
            echo_json(estimate_fields(expected))
        if expected.refusal is not None:
            raise expected.refusal
        if not as_json:
            typer.echo(expectation(expected))


def estimate_fields(expected: Estimate) -> dict[str, object]:
    """An estimate for programs; the refusal as the sentence that people see."""
    fields = {field.name: getattr(expected, field.name) for field in dataclasses.fields(expected)}
    fields["refusal"] = None if expected.refusal is None else describe(expected.refusal)
    return fields
