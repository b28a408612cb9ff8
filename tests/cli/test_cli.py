"""The commands that talk to a scheduler: what they print, where, and with which exit code."""

import functools
import io
import json
import os
import queue
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import typer.main
from typer.testing import CliRunner

from paceline.v1 import inference_pb2 as pb
from paceline.v1.sampling_pb2 import StructuredOutput
from paceline_cli.app import app
from paceline_cli.sentences import explained
from paceline_cli.waiting import WaitingNotice
from paceline_client import Client, Explanation, FinishReason, RequestState, Times
from paceline_client.testing import Break, Die, End, Fail, FakeServer, Hold, Tokens, echo, say, standby

COMMANDS = [
    *("up", "chat", "generate", "models", "top", "explain", "estimate", "profile", "replay", "token"),
    *("bench", "demo", "chaos", "validate", "serve"),
]


def run(*arguments, target=None, stdin=None):
    options = [] if target is None else ["--target", target]
    return CliRunner().invoke(app, [*arguments, *options], input=stdin)


def played(script, *arguments, stdin=None):
    """Run the command line against a server that plays a script; returns its result, and the requests that came."""
    with FakeServer(script) as server:
        return run(*arguments, target=server.target, stdin=stdin), server.seen.requests


def test_generate_streams_the_answer_to_stdout():
    """The text and one newline, nothing else: it can be piped."""
    result, (sent,) = played(say("The capital is Paris."), "generate", "What is the capital of France?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "The capital is Paris.\n", "")
    assert sent.chat.messages[0].content == "What is the capital of France?"


def test_generate_sends_what_the_options_say():
    options = ["--max-tokens", "7", "--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--min-p", "0.25"]
    options += ["--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.5"]
    options += ["--min-tokens", "2", "--logprobs", "0", "--timeout", "60", "--priority", "-5", "-n", "1"]
    options += ["--max-draft-tokens", "0"]
    options += ["--seed", "9", "--stop", "a", "--stop", "b", "--model", "fake", "--raw"]
    result, (raw,) = played(echo, "generate", "go", *options)
    _, (chat,) = played(echo, "generate", "go", "--system", "be brief")
    assert result.stdout == "go\n"
    assert (raw.text, raw.model, raw.sampling.temperature, raw.sampling.seed) == ("go", "fake", 0.0, 9)
    assert (raw.sampling.top_p, raw.sampling.top_k, raw.sampling.min_p) == (0.5, 3, 0.25)
    assert (raw.sampling.presence_penalty, raw.sampling.frequency_penalty) == (1, -1)
    assert (raw.sampling.repetition_penalty, raw.sampling.n) == (1.5, 1)
    assert (raw.stopping.max_tokens, raw.stopping.min_tokens, list(raw.stopping.stop)) == (7, 2, ["a", "b"])
    assert (raw.output.HasField("logprobs"), raw.timeout.seconds, raw.priority) == (True, 60, -5)
    assert (raw.speculation.HasField("max_num_draft_tokens"), raw.speculation.max_num_draft_tokens) == (True, 0)
    assert [message.role for message in chat.chat.messages] == ["system", "user"]
    assert not chat.HasField("sampling")
    assert not chat.HasField("speculation")


def test_an_answer_is_asked_for_in_a_form(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    for options, sent in (
        (("--json-schema", str(file)), {"json_schema": '{"type": "integer"}'}),
        (("--regex", "a+"), {"regex": "a+"}),
        (("--choice", "yes", "--choice", "no"), {"choice": {"options": ["yes", "no"]}}),
        (("--json-object",), {"json_object": True}),
    ):
        _, (request,) = played(say("1"), "generate", "?", *options)
        assert request.structured == StructuredOutput(**sent)
    for options in (("--regex", "a", "--json-object"), ("--json-schema", str(tmp_path / "none"))):
        assert run("generate", "?", *options).exit_code == 2


@pytest.mark.parametrize("command", [("generate", "?"), ("chat",)], ids=lambda command: command[0])
def test_the_model_is_shown_tools_and_its_template_told_values(tmp_path, command):
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "f"}, {"type": "function", "function": {"name": "g", "parameters": {"a": 1}}}]')
    given = ("flag=false", "count=3", "share=0.5", 'text="3"', "words=a=b", "list=[1]")
    options = [part for each in given for part in ("--template-argument", each)]

    _, (request,) = played(say("1"), *command, "--tools", str(file), *options, stdin="?\n")

    assert [(tool.name, tool.parameters_json_schema) for tool in request.chat.tools] == [("f", ""), ("g", '{"a":1}')]
    arguments = {
        name: (each.WhichOneof("value"), getattr(each, each.WhichOneof("value")))
        for name, each in request.chat.template_arguments.items()
    }
    assert arguments == {
        "flag": ("flag", False),
        "count": ("integer", 3),
        "share": ("number", 0.5),
        "text": ("text", "3"),
        "words": ("text", "a=b"),
        "list": ("text", "[1]"),
    }


@pytest.mark.parametrize(
    ("content", "exit_code"),
    [(None, 2), ("{", 2), ("[" * 100_000, 2), ('{"name": "f"}', 65), ('[{"nome": "f"}]', 65)],
)
def test_a_file_that_holds_no_tools_is_told(tmp_path, content, exit_code):
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_text(content)
    result = run("generate", "?", "--tools", str(file))
    assert result.exit_code == exit_code
    assert "tools" in result.stderr


def test_an_argument_of_the_template_has_a_name():
    assert run("generate", "?", "--template-argument", "flag").exit_code == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_without_a_bound_of_its_own_ends_in_time_and_says_so(command):
    """A model that loops would go on to the end of its context, which is the bound where it holds fewer tokens."""

    def loops(request):
        return [Tokens(tuple(range(request.stopping.max_tokens)), "and so on"), End(FinishReason.LENGTH)]

    def holds_little(request):
        refusal = Fail(grpc.StatusCode.INVALID_ARGUMENT, "at most 9 fit", field="stopping.max_tokens")
        return [refusal] if request.stopping.HasField("max_tokens") else say("short")

    def asked(script, *options):
        arguments = ("generate", "?", *options) if command == "generate" else ("chat", *options)
        return played(script, *arguments, stdin="?\n")[0]

    told = "ended after 1,024 tokens; --max-tokens lets it be longer\n"
    assert told in asked(loops).stderr
    assert told not in asked(loops, "--max-tokens", "1024").stderr
    assert asked(holds_little).stdout.strip() == "short"
    assert asked(holds_little, "--max-tokens", "10").exit_code == 65


def test_several_answers_are_shown_one_after_another():
    """They come side by side, which nobody could read; JSON has each in full."""
    script = [Tokens((1,), "b", completion=1), Tokens((2,), "a"), End(completion=1), End()]
    text, _ = played(script, "generate", "?", "-n", "2")
    fields = json.loads(played(script, "generate", "?", "-n", "2", "--json")[0].stdout)
    assert (text.exit_code, text.stdout) == (0, "[1]\na\n[2]\nb\n")
    assert [completion["text"] for completion in fields["completions"]] == ["a", "b"]
    assert fields["text"] == "a"


def test_a_request_is_explained_or_unknown():
    with FakeServer([Tokens((1, 2), "a"), Hold()]) as server, Client(server.target) as client:
        with client.stream("?", request_id="r", tenant="t") as stream:
            next(stream)
            lines = run("explain", "r", "--tenant", "t", target=server.target).stdout
            fields = json.loads(run("explain", "r", "--tenant", "t", "--json", target=server.target).stdout)
        unknown = run("explain", "other", target=server.target)
    assert lines == "running on fake\n0 tokens computed, 2 generated\n6 of 8 drafts became output\n"
    assert (fields["state"], fields["executor"], fields["num_output_tokens"]) == ("running", "fake", 2)
    assert (unknown.exit_code, unknown.stderr) == (66, "error: no such request\n")


@pytest.mark.parametrize(
    ("explanation", "lines"),
    [
        (
            Explanation(RequestState.PREEMPTED, "blocks", 3, 2, "a bigger one", "", 5, 4),
            [
                *("preempted", "waits for: blocks (3 ahead of it)", "preempted 2 times, last: a bigger one"),
                "5 tokens computed, 4 generated",
            ],
        ),
        (
            Explanation(RequestState.RUNNING, "", 0, 0, "", "here", 9, 8, 6, 5, times=Times(0.25, 1.5, 0.004, 0.0)),
            [
                *("running on here", "9 tokens computed, 8 generated", "queued 250 ms, prefill 1.5 s, decode 4 ms"),
                "5 of 6 drafts became output",
            ],
        ),
        (
            Explanation(RequestState.RUNNING, "", 0, 0, "", "here", 9, 8, times=Times(0.0, 0.0, 0.0, 0.0)),
            ["running on here", "9 tokens computed, 8 generated"],
        ),
    ],
    ids=["waiting", "drafting", "just come"],
)
def test_an_explanation_says_what_is_waited_for_and_where_the_time_went(explanation, lines):
    assert explained(explanation).splitlines() == lines


def test_an_estimate_is_one_line_or_the_refusal_that_would_come():
    refusal = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=2.0)
    scripts = {"taken": say("x"), "refused": [refusal]}
    with FakeServer(lambda request: scripts[request.text]) as server:
        taken = run("estimate", "--raw", "taken", target=server.target)
        refused = run("estimate", "--raw", "refused", target=server.target)
        fields = json.loads(run("estimate", "--raw", "refused", "--json", target=server.target).stdout)
        assert server.seen.requests == []
    assert taken.stdout == "first token in 250 ms, then one every 10 ms; 5 prompt tokens, 1 of them cached\n"
    assert (refused.exit_code, refused.stderr) == (75, "error: full; try again in 2.0 s\n")
    assert fields["refusal"] == "full; try again in 2.0 s"


def test_a_request_with_no_time_is_refused_by_name():
    result = run("generate", "?", "--timeout", "0", target="127.0.0.1:1")
    assert (result.exit_code, result.stderr.startswith("error: timeout: ")) == (65, True)


def test_generate_reads_stdin():
    """Without the newline that echo puts at its end, and only as UTF-8."""
    result, (sent,) = played(echo, "generate", "-", "--raw", stdin="two\nlines\n")
    assert (result.stdout, sent.text) == ("two\nlines\n", "two\nlines")
    result, _ = played(echo, "generate", "-", stdin=b"\xff\xfe")
    assert (result.exit_code, result.stderr) == (65, "error: stdin: not UTF-8 at byte 0\n")


def test_generate_prints_json_for_programs():
    result, _ = played(say("Grüße dir"), "generate", "?", "--json")
    fields = json.loads(result.stdout)
    assert (fields["text"], fields["token_ids"], fields["finish_reason"]) == ("Grüße dir", [0, 1], "stop")
    assert fields["usage"] == {
        "num_prompt_tokens": 1,
        "num_cached_tokens": 0,
        "num_output_tokens": 2,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "num_reasoning_tokens": 0,
    }
    assert fields["time_to_first_token_seconds"] > 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 65),
        (grpc.StatusCode.NOT_FOUND, 66),
        (grpc.StatusCode.UNAVAILABLE, 69),
        (grpc.StatusCode.INTERNAL, 70),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 75),
        (grpc.StatusCode.PERMISSION_DENIED, 77),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 124),
        (grpc.StatusCode.ABORTED, 1),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(code, expected):
    failure = Fail(code, "it is\nwrong", field="sampling.top_p", retry_after_seconds=9.0)
    result, _ = played([failure], "generate", "?")
    assert result.exit_code == expected
    assert result.stderr == "error: it is wrong (sampling.top_p); try again in 9.0 s\n"


def test_a_damaged_stream_is_a_failure_of_its_own():
    result, _ = played([Tokens((1,), "a"), Tokens((2,), "b", hash_error=1)], "generate", "?")
    assert (result.exit_code, result.stdout) == (76, "a\n")


def test_no_server_is_one_line_that_says_what_to_do():
    """Soon, because a person waits."""
    result = run("generate", "?", target="127.0.0.1:1")
    assert result.exit_code == 69
    assert result.stderr.startswith("error: cannot reach 127.0.0.1:1: ")
    assert result.stderr.endswith("Start one with: paceline up\n")
    assert result.stderr.count("\n") == 1


def test_the_target_may_come_from_the_environment(monkeypatch):
    with FakeServer(say("hi")) as server:
        monkeypatch.setenv("PACELINE_TARGET", server.target)
        assert run("generate", "?").stdout == "hi\n"


def test_models_are_a_table_or_json():
    model = pb.Model(
        name="small", architecture="llama", max_model_len=2048, num_executors=2, num_parameters=135_000_000
    )
    model.weight_bytes = 90 << 20
    model.supports_tools = model.supports_reasoning = True
    model.default_sampling.temperature = 0.5
    with FakeServer(models=[model]) as server:
        table = run("models", target=server.target)
        array = run("models", "--json", target=server.target)
    header, row = table.stdout.splitlines()
    named = ["Model", "Architecture", "Size", "Weights", "Bits", "Memory", "Context", "Executors", "Parts"]
    assert header.split() == named
    sizes = ["135", "M", "unquantised", "5.6", "90", "MiB", "2048", "2"]
    assert row.split() == ["small", "llama", *sizes, "both"]
    (fields,) = json.loads(array.stdout)
    assert (fields["name"], fields["default_sampling"]) == ("small", {"temperature": 0.5})


def test_no_model_is_not_an_empty_table():
    with FakeServer(models=[]) as server:
        result = run("models", target=server.target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No executor is attached" in result.stderr


def test_a_chat_remembers():
    typed = "hello\n\nand you?\n/reset\nbye\n/exit\nx\n"
    result, requests = played(say("fine thanks"), "chat", "--system", "be kind", stdin=typed)
    turns = [[(turn.role, turn.content) for turn in request.chat.messages] for request in requests]
    assert (result.exit_code, result.stdout) == (0, "fine thanks\n" * 3)
    opening = ("system", "be kind")
    assert turns == [
        [opening, ("user", "hello")],
        [opening, ("user", "hello"), ("assistant", "fine thanks"), ("user", "and you?")],
        [opening, ("user", "bye")],
    ]


def test_a_chat_survives_a_failed_turn():
    refusal = Fail(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is too long", field="chat")
    scripts = {"long": [refusal], "short": say("ok")}

    def script(request):
        return scripts[request.chat.messages[-1].content]

    result, (*_, last) = played(script, "chat", stdin="short\nlong\nshort\n")
    assert (result.exit_code, result.stdout) == (65, "ok\nok\n")
    assert "the prompt is too long (chat)" in result.stderr
    assert "/reset forgets it" in result.stderr
    assert [turn.content for turn in last.chat.messages] == ["short", "ok", "short"]


@pytest.mark.parametrize(("arguments", "stdin"), [(["chat"], "one\n"), (["generate", "one"], None)])
def test_an_answer_survives_its_connection(arguments, stdin):
    """A server that was restarted costs a pause, and nothing is said about it."""
    script = [Tokens((1,), "a"), Break(), Tokens((2,), "b"), Die(), Tokens((3,), "c"), End()]
    with FakeServer(script) as server:
        result = run(*arguments, target=server.target, stdin=stdin)
        assert server.seen.num_sessions > 1
    assert (result.exit_code, result.stdout.strip(), result.stderr) == (0, "abc", "")


def test_an_unknown_chat_command_is_explained():
    result, requests = played(say("hi"), "chat", stdin="/what\n")
    assert requests == []
    assert "/exit or Ctrl-D leaves" in result.stderr


@functools.cache
def help_of(command):
    """What `paceline COMMAND --help` prints on a terminal of 80 columns."""
    result = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=80)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_for_people_and_fits_a_terminal_of_80_columns(command):
    shown = help_of(command)
    usage, sentence, *_ = filter(None, map(str.strip, shown.splitlines()))
    assert max(map(len, shown.splitlines())) <= 80
    assert usage.startswith("Usage: ")
    assert sentence.endswith(".")
    names = re.findall(r"^│ [* ]{0,3}(-\S+)", shown, re.MULTILINE)
    assert names
    assert not [name for name in names if name.endswith("…")]
    assert not re.search(r"<[a-z]+>|list\[", shown)


def test_help_says_what_holds_where_an_option_is_unset():
    """Also where a command decides that by itself, or the executor: its automatic choice for the cache is int8."""
    words = " ".join(re.findall(r"[^│\s]+", help_of("bench")))
    assert "random for a range. Unset, 128." in words
    assert "Requests per rung. Unset, 200, or the whole trace." in words
    assert "int8 (auto)" in " ".join(re.findall(r"[^│\s]+", help_of("up")))


def test_the_list_of_commands_is_not_cut():
    panel = help_of("").partition("─ Commands ─")[2].partition("╰")[0].splitlines()[1:]
    listed = [line.strip("│ ") for line in panel]
    assert [line.split()[0] for line in listed] == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_wrong_use_is_explained_and_exits_with_2():
    for arguments in (["up", "--no-such-option"], ["generate"], ["models", "extra"], ["generate", "x", "--seed", "y"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_is_empty_is_refused_and_means_no_default(command):
    """It was to be a shell variable's value. An empty system text or tenant is one like others."""
    params = typer.main.get_group(app).commands[command].params
    names = [param.opts[0] for param in params if param.param_type_name == "option" and not param.is_flag]
    for name in {*names} - {"--system", "--tenant"}:
        for arguments in ([name, ""], [f"{name}="]):
            result = CliRunner().invoke(app, [command, *arguments])
            assert (result.exit_code, "it is empty" in result.stderr) == (2, True), arguments


def test_a_prompt_may_be_piped_in_without_a_dash():
    result, (sent,) = played(say("hi"), "generate", "--raw", stdin="Once\n")
    assert (result.stdout, sent.text) == ("hi\n", "Once")
    assert played(say("hi"), "estimate", "--raw", stdin="Once\n")[0].exit_code == 0
    assert played(say("hi"), "generate", stdin="")[0].exit_code == 2


def test_a_model_without_a_chat_template_leads_to_the_option_for_that():
    refusal = Fail(grpc.StatusCode.INVALID_ARGUMENT, "the model 'x' has no chat template; send text instead")
    result, _ = played([refusal], "generate", "hi")
    assert result.stderr == "error: the model 'x' has no chat template; continue a text with: paceline generate --raw\n"


def test_a_standby_alone_leads_to_the_server_that_it_names():
    with FakeServer() as standing_by, FakeServer(say("hi")) as active:
        standing_by.turn_away(standby(active.target))
        assert "fake" in run("models", target=standing_by.target).stdout
        assert run("generate", "?", target=standing_by.target).stdout == "hi\n"


def test_after_a_second_it_is_said_what_a_command_waits_for():
    """Where the server that serves cannot be reached: nobody has to guess."""
    with FakeServer() as server:
        server.turn_away(standby("127.0.0.1:1"))
        result = run("generate", "?", "--timeout", "4", target=server.target)
    assert result.exit_code == 124
    assert f"waiting: cannot reach {server.target} (this scheduler stands by; 127.0.0.1:1 serves)" in result.stderr
    assert "Is it running?" not in result.stderr


class Acting(io.StringIO):
    """A stderr whose reader acts whenever it is said what is waited for."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def write(self, text):
        if "waiting:" in text:
            self._act()
        return super().write(text)


@pytest.fixture
def run_acting(run_main, monkeypatch, capsys):
    """Run a command whose user acts; returns exit code, stdout, and the lines of stderr."""

    def run(*arguments, act, stdin=""):
        said = Acting(act)
        monkeypatch.setattr("sys.stderr", said)
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return run_main(*arguments), capsys.readouterr().out, said.getvalue().splitlines()

    return run


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("command", [("generate", "?"), ("chat",)])
def test_it_is_said_what_a_request_waits_for_before_its_first_token_or_after_it(run_acting, command, position):
    """An executor restarts: the server goes on once that was said."""
    script = [Tokens((1,), "a"), Tokens((2,), "b"), End()]
    script.insert(position, Hold())
    with FakeServer(script) as server:
        server.keep_waiting("executor-0 has to attach")
        code, shown, said = run_acting(*command, "--target", server.target, act=server.release, stdin="?\n")
    assert (code, shown.strip()) == (0, "ab")
    assert said.count("waiting: executor-0 has to attach") == 1


def test_a_request_that_stands_still_again_says_so_again(monkeypatch):
    class Asked:
        trouble = ""

        def explain(self, request_id):
            return SimpleNamespace(waiting_for=f"{request_id} has to attach")

    said = queue.Queue()
    monkeypatch.setattr("paceline_cli.waiting.typer.echo", lambda line, err: said.put(line))
    with WaitingNotice(Asked(), SimpleNamespace(request_id="executor-0")) as notice:
        for _ in range(2):
            notice.heard()
            assert said.get(timeout=30) == "waiting: executor-0 has to attach"
    assert said.empty()


def test_a_chat_waits_for_the_first_executor(run_acting):
    nobody = Fail(grpc.StatusCode.UNAVAILABLE, "no executor is attached yet; try again", "NO_EXECUTOR")
    with FakeServer(say("hi")) as server:
        server.turn_away(nobody)
        options = "--target", server.target, "--max-outage", "300"
        code, shown, said = run_acting("chat", *options, act=lambda: server.turn_away(None), stdin="?\n")
    assert (code, shown.strip()) == (0, "hi")
    assert said[0] == "waiting: no executor is attached yet; try again"


@pytest.mark.parametrize("command", [("generate", "?"), ("chat",)])
def test_how_long_to_wait_for_an_executor_goes_with_the_request(command):
    _, (sent,) = played(say("hi"), *command, "--max-outage", "7", stdin="?\n")
    assert sent.max_outage.seconds == 7
    assert run(*command, "--max-outage", "0").exit_code == 65


def test_shells_complete_commands():
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline ge", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="paceline", env=asked).stdout.split() == ["generate"]


def test_the_version_is_the_distributions():
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("paceline ")


def test_without_the_extra_the_command_says_what_to_install(run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert (
        run_main()
        == "error: the paceline command needs typer: in the checkout, pip install ./protos ./clients '.[cli]'"
    )


@pytest.mark.parametrize("arguments", [["generate", "x"], ["--help"]])
def test_a_reader_that_goes_away_is_no_traceback(arguments):
    """As in `paceline generate ... | head -1`: also not when the interpreter ends."""
    reading, writing = os.pipe()
    os.close(reading)
    with FakeServer(say("many words " * 50)) as server, os.fdopen(writing, "w") as stdout:
        command = sys.executable, "-m", "paceline_cli", *arguments
        environment = os.environ | {"PACELINE_TARGET": server.target}
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["generate", "x"], ["generate", "x", "--json"], ["chat"], ["models"], ["-h"]])
def test_no_command_hides_that_its_output_cannot_be_written(arguments, run_main, monkeypatch, capsys):
    """A full disk is nobody's bug: one line with the reason, and the exit code for it."""
    with FakeServer(say("hi there")) as server, Path("/dev/full").open("w") as full:
        monkeypatch.setenv("PACELINE_TARGET", server.target)
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        monkeypatch.setattr("sys.stdout", full)
        assert run_main(*arguments) == 74
    assert capsys.readouterr().err == "error: input or output failed: No space left on device\n"


def test_a_character_that_the_encoding_lacks_is_replaced(run_main, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with FakeServer(say("Grüße, 世界")) as server:
        monkeypatch.setattr("sys.stdout", stdout)
        assert run_main("generate", "x", "--target", server.target) == 0
        array = CliRunner(charset="ascii").invoke(app, ["generate", "x", "--target", server.target, "--json"])
    assert stdout.buffer.getvalue() == b"Gr??e, ??\n"
    assert json.loads(array.stdout)["text"] == "Grüße, 世界"


def test_an_unforeseen_error_is_one_line_unless_a_traceback_is_wanted(run_main, monkeypatch, capsys):
    def fail(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("paceline_cli.commands.models.cli_client", fail)
    assert run_main("models") == 70
    shown = capsys.readouterr().err
    assert shown.startswith("error: unexpected ZeroDivisionError: oops")
    assert "Traceback" not in shown
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run_main("models")
