"""The `paceline` command: its subcommands and its version."""

import inspect
import itertools
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from paceline_cli.commands.bench import bench
from paceline_cli.commands.chaos import chaos
from paceline_cli.commands.chat import chat
from paceline_cli.commands.demo import demo
from paceline_cli.commands.explain import estimate, explain
from paceline_cli.commands.generate import generate
from paceline_cli.commands.models import models
from paceline_cli.commands.profile import profile
from paceline_cli.commands.replay import replay
from paceline_cli.commands.token import token
from paceline_cli.commands.top import top
from paceline_cli.commands.up import up
from paceline_cli.commands.validate import validate

# An empty line between two keeps them apart.
EXIT_CODES_TEXT = """\
[bold]Exit codes[/bold]

2 wrong use of this command · 65 the request is wrong · 66 no such model or request · 69 no server, or nothing serves

70 the server failed · 74 the output cannot be written · 75 overloaded, try again later · 76 the tokens were damaged

77 access denied · 124 timed out · 130 interrupted · 141 the output's reader went away

up and demo end with the exit code of the process that failed.
"""


_MAY_BE_EMPTY = ("--system", "--tenant")


class _Command(TyperCommand):
    """Its help says no Python types: flags need none, and arguments have names that say more. Options are refused that
    are empty, as a shell variable makes them that is unset: they would mean the default, or this folder.
    """

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [argument.partition("=") for argument in args]
        empty = {option for option, equals, value in given if equals and not value}
        empty |= {option for option, value in itertools.pairwise(args) if not value}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            wrong = set() if is_argument or param.is_flag else empty.intersection(param.opts).difference(_MAY_BE_EMPTY)
            if wrong:
                raise typer.BadParameter("it is empty: give a value, or leave the option out", param_hint=min(wrong))
        return super().parse_args(ctx, args)

    @override
    def get_params(self, ctx: Any) -> list[Any]:  # typer brings click along under a name of its own
        return _untyped(super().get_params(ctx))


class _Group(TyperGroup):
    @override
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


def _untyped(params: list[Any]) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument" or param.is_flag:
            vars(param)["display_type_rich"] = lambda ctx: None  # noqa: ARG005
    return params


app = typer.Typer(
    name="paceline",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=EXIT_CODES_TEXT,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def paceline(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve and use large language models.

    Start with: paceline up. Then, in another terminal: paceline chat.
    """


def _paragraphs(text: str) -> str:
    """A docstring as help: where its lines end is for the reader of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


for command in (
    up,
    chat,
    generate,
    models,
    top,
    explain,
    estimate,
    profile,
    replay,
    token,
    bench,
    demo,
    chaos,
    validate,
):
    app.command(cls=_Command, help=_paragraphs(command.__doc__ or ""))(command)
app.command("serve", cls=_Command, help="The same as [bold]up[/bold].")(up)
