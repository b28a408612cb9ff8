"""`paceline chat`: a conversation in the terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import typer

from paceline_cli import options
from paceline_cli.answer_bound import ask_bounded, tell_if_met
from paceline_cli.answer_parts import ShownParts
from paceline_cli.client import cli_client
from paceline_cli.config import DEFAULT_TARGET, TargetOption
from paceline_cli.failures import describe, exit_code_of, print_error, reported
from paceline_cli.waiting import WaitingNotice
from paceline_client.config import Timeout
from paceline_client.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline_client.requests import Message, Output, Sampling, Scheduling, Stopping, TemplateValue, ToolLike
from paceline_client.results import Model, OutputPart, ReasoningPart, TextPart
from paceline_client.sync_client import Client
from paceline_client.tools import ToolCall

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves. Ctrl-C stops an answer, Alt-Enter begins a line."
_COMMANDS = ("/reset", "/exit", "/quit", "/help")


@options.takes_sampling
def chat(
    system: options.SystemOption = None,
    max_tokens: options.AnswerTokensOption = None,
    *,
    sampling: Sampling,
    tools: options.ToolsOption = None,
    template_argument: options.TemplateArgumentOption = None,
    timeout: options.RequestTimeoutOption = None,
    max_outage: options.MaxOutageOption = None,
    priority: options.PriorityOption = None,
    model: options.ServedModelOption = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: options.TlsDirOption = None,
    token_file: options.TokenFileOption = None,
) -> None:
    """Talk to a model. It remembers the conversation.

    /reset forgets it, /exit or Ctrl-D leaves. Ctrl-C stops an answer, or clears the line. Up recalls what was typed, a
    pasted text is one turn, and Alt-Enter begins a new line in a turn.

    Where the model calls tools (--tools) you are asked what each call gave, by the tool's name, and the answer goes on.
    An empty line gives nothing: such a call is forgotten.

    Of turns and results that are piped in each line is one; where a turn fails so does the command.
    """
    with reported(), cli_client(target, tls_dir, token_file, max_outage) as client:
        with WaitingNotice(client):
            served = served_model(client, model, max_outage)
        conversation = Conversation(
            client,
            served.name,
            system=system,
            tools=options.tools_of(tools),
            template_arguments=options.template_arguments_of(template_argument),
            sampling=sampling,
            max_tokens=max_tokens,
            scheduling=Scheduling(priority=priority),
            timeout=options.timeout_of(timeout),
        )
        if sys.stdin.isatty():
            typer.secho(f"Talking to {served.name} at {target}. {_HELP}", err=True, dim=True)
        for line in read_lines(lambda: f"{conversation.called or ''}> "):
            match line.strip():
                case "/exit" | "/quit":
                    break
                case "/reset":
                    conversation.reset()
                case result if conversation.called:  # it may begin with a slash
                    conversation.give(result)
                case "":
                    continue
                case command if command.startswith("/"):
                    typer.echo(_HELP, err=True)
                case text:
                    conversation.say(text)
        if not sys.stdin.isatty() and conversation.first_error is not None:
            raise typer.Exit(exit_code_of(conversation.first_error))


def served_model(client: Client, name: str | None, max_outage_seconds: float | None) -> Model:
    """Waits for it where no executor has said yet what it serves."""
    try:
        return client.get_model(name)
    except UnavailableError as error:
        if error.reason != "NO_EXECUTOR":
            raise
        typer.echo(f"waiting: {error}", err=True)
    client.wait_until_ready(options.retry_of(max_outage_seconds).max_outage_seconds)
    return client.get_model(name)


class Conversation:
    """What was said so far, and the client to go on with."""

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        system: str | None,
        tools: Sequence[ToolLike] | None,
        template_arguments: Mapping[str, TemplateValue],
        sampling: Sampling,
        max_tokens: int | None,
        scheduling: Scheduling,
        timeout: Timeout,
    ) -> None:
        self._client = client
        self._model = model
        self._opening = [] if system is None else [Message("system", system)]
        self._tools = tools
        self._template_arguments = template_arguments
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._scheduling = scheduling
        self._timeout = timeout
        self._turns: list[Message] = []
        self._exchange: list[Message] = []  # what was said since the last answer that was remembered
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        self._first_error: PacelineError | None = None

    @property
    def first_error(self) -> PacelineError | None:
        """Why the first turn failed that did; None while all were answered."""
        return self._first_error

    @property
    def called(self) -> str | None:
        """The tool whose result the model waits for; None where it waits for a turn."""
        return self._calls[len(self._results)].name if self._calls else None

    def reset(self) -> None:
        """Forget everything but the system text."""
        self._turns.clear()
        self._calls.clear()
        self._results.clear()

    def say(self, text: str) -> None:
        """Send a turn and print the answer. A turn without an answer is not remembered, a stopped one as it stands."""
        self._exchange = [Message("user", text)]
        self._go_on()

    def give(self, result: str) -> None:
        """What the call gave that the model waits for: of the last one, send them and print how the answer goes on.

        A call that gave nothing is forgotten, since chat templates want each answered.
        """
        self._results.append(Message("tool", result, tool_call_id=self._calls[len(self._results)].id))
        if len(self._results) < len(self._calls):
            return
        results = [each for each in self._results if each.content]
        answered = {each.tool_call_id for each in results}
        answer = self._exchange.pop()
        answer = replace(answer, tool_calls=[call for call in self._calls if call.id in answered])
        self._calls, self._results = [], []
        if results:
            self._exchange += [answer, *results]
            self._go_on()
        else:
            self._remember(answer)

    def _go_on(self) -> None:
        try:
            messages = [*self._opening, *self._turns, *self._exchange]
            answer = ask_bounded(self._max_tokens, lambda most: self._ask(messages, most))
        except PacelineError as error:
            self._first_error = self._first_error or error
            print_error(describe(error))
            if isinstance(error, InvalidRequestError) and self._turns:
                typer.echo("If the conversation has become too long, /reset forgets it.", err=True)
            return
        if answer.tool_calls:
            self._exchange.append(answer)
            self._calls = list(answer.tool_calls)
        else:
            self._remember(answer)

    def _remember(self, answer: Message) -> None:
        if answer.content:
            self._turns += [*self._exchange, answer]

    def _ask(self, messages: list[Message], max_tokens: int | None) -> Message:
        stream = self._client.stream(
            messages=messages,
            tools=self._tools,
            template_arguments=self._template_arguments,
            sampling=self._sampling,
            stopping=Stopping(max_tokens=max_tokens),
            output=Output(parts=True),
            scheduling=self._scheduling,
            model=self._model,
            timeout=self._timeout,
        )
        printed, shown, is_stopped = AnswerText(), ShownParts(), False
        parts: list[OutputPart] = []
        with stream, WaitingNotice(self._client, stream) as notice:
            try:
                for delta in stream:
                    notice.heard()
                    parts += delta.parts
                    printed.add(shown.text_of(delta.parts))
            except KeyboardInterrupt:
                is_stopped = True
                printed.show(" …")
            except PacelineError:
                printed.end_line()
                raise
        printed.end()
        calls: list[ToolCall] = []
        if not is_stopped:
            tell_if_met(stream.result, self._max_tokens)
            calls = [call for call in stream.result.tool_calls if _is_whole(call)]
        content = "".join(part.text for part in parts if isinstance(part, TextPart))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        return Message("assistant", content, reasoning=reasoning or None, tool_calls=calls)


def _is_whole(call: ToolCall) -> bool:
    """`max_tokens` may have cut it: then it can be neither answered nor sent again."""
    try:
        return isinstance(json.loads(call.arguments or "{}"), dict)
    except ValueError:
        return False


class AnswerText:
    def __init__(self) -> None:
        self._ends_line = True

    def add(self, text: str) -> None:
        if text:
            self._ends_line = text.endswith("\n")
        self.show(text)

    def show(self, text: str) -> None:
        """Print without remembering."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """What comes next begins a line."""
        if not self._ends_line:
            self.show("\n")

    def end(self) -> None:
        """Leave an empty line before the next turn."""
        self.show("\n\n" if sys.stdin.isatty() else "\n")


def read_lines(prompt: Callable[[], str]) -> Iterator[str]:
    """What the user types, or what was piped in, until its end. Ctrl-C clears the line.

    Where the answers go elsewhere than to the terminal the editor's prompt would go with them, so there is none.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from (line.removesuffix("\n") for line in sys.stdin)
        return
    from paceline_cli.line_editor import LineEditor  # only now: what is piped in needs none of it

    editor = LineEditor(_COMMANDS)
    while True:
        try:
            yield editor.read(prompt())
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("Ctrl-D or /exit leaves.", err=True)
