"""What only a terminal shows: bars, prompts, and Ctrl-C in the middle of an answer."""

import io
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from paceline_cli.progress import BarView, LineView
from paceline_cli.stopwatch import Stopwatch
from paceline_cli.supervisor.events import BecameReady, Exited, Printed, Progressed, Said, Started, StillRunning
from paceline_cli.supervisor.log_lines import Level
from paceline_client.results import ToolCallPart
from paceline_client.testing import End, FakeServer, Hold, Tokens, say

PACELINE = (sys.executable, "-m", "paceline_cli")


# What a line begins with, before the editor moves the cursor behind it.
PROMPT = ">"
UP = "\x1b[A"
PASTED = "\x1b[200~{}\x1b[201~"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*PACELINE, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # Nobody answers here where the cursor is.
            env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self._text = ""

    def type(self, text):
        os.write(self._ours, text.encode() + b"\n")

    def press(self, keys):
        """Type without ending the line."""
        os.write(self._ours, keys.encode())

    def read_until(self, text):
        """What is shown from here up to this text."""
        while text not in self._text:
            self._text += os.read(self._ours, 4096).decode()
        shown, _, self._text = self._text.partition(text)
        return shown

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_ctrl_c_stops_an_answer_and_not_the_chat():
    scripts = {"tell me": [Tokens((1,), "Once"), Hold()], "go on": say("upon a time")}
    with (
        FakeServer(lambda request: scripts[request.chat.messages[-1].content]) as server,
        Terminal("chat", "--target", server.target) as terminal,
    ):
        assert "Talking to fake" in terminal.read_until(PROMPT)
        terminal.type("tell me")
        terminal.read_until("Once")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(" …")
        server.wait_for(lambda seen: len(seen.cancelled) == 1)
        terminal.read_until(PROMPT)
        terminal.type("go on")
        terminal.read_until("upon a time")
        terminal.read_until(PROMPT)
        terminal.type("/exit")
        assert terminal.process.wait(60) == 0
        turns = [turn.content for turn in server.seen.requests[-1].chat.messages]
    assert turns == ["tell me", "Once", "go on"]


def test_results_of_calls_are_asked_for_by_name():
    """Ctrl-C clears what was typed, and stops an answer that calls: its calls are not asked for."""
    call = Tokens((1,), parts=(ToolCallPart(0, "{}", id="a1B2c3D4e", name="weather"),))
    scripts = {"warm?": [call, End()], "21": say("yes"), "cold?": [call, Hold()]}
    with (
        FakeServer(lambda request: scripts[request.chat.messages[-1].content]) as server,
        Terminal("chat", "--target", server.target) as terminal,
    ):
        terminal.read_until(PROMPT)
        terminal.type("warm?")
        terminal.read_until("weather" + PROMPT)
        terminal.press("13\x03")
        terminal.read_until("leaves")
        terminal.read_until("weather" + PROMPT)
        terminal.type("21")
        terminal.read_until("yes")
        terminal.read_until(PROMPT)
        terminal.type("cold?")
        terminal.read_until("weather {}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(" …")
        assert "weather" not in terminal.read_until(PROMPT)
        turns = [turn.content for turn in server.seen.requests[-1].chat.messages]
    assert turns == ["warm?", "", "21", "yes", "cold?"]


def test_a_pasted_text_is_one_turn_and_lines_can_be_recalled_edited_and_completed():
    """Completed are only commands of a chat, of those that there are."""
    pasted = "def f(x):\n    return x\n\nWhat does this do?"
    with FakeServer(say("yes")) as server, Terminal("chat", "--target", server.target) as terminal:
        for typed in (PASTED.format(pasted), "hi", UP * 2, UP + "\x7f!", "one\x1b\rtwo"):
            terminal.read_until(PROMPT)
            terminal.type(typed)
            terminal.read_until("yes")
        terminal.read_until(PROMPT)
        terminal.press("/ex\t")
        terminal.read_until("it")
        terminal.type("")
        assert terminal.process.wait(60) == 0
        turns = [request.chat.messages[-1].content for request in server.seen.requests]
    assert turns == [pasted, "hi", pasted, pasted[:-1] + "!", "one\ntwo"]


def test_ctrl_c_ends_generate():
    with (
        FakeServer([Tokens((1,), "Once"), Hold()]) as server,
        Terminal("generate", "x", "--target", server.target) as terminal,
    ):
        terminal.read_until("Once")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("\n")  # the shell's prompt begins a line
        assert terminal.process.wait(60) == 130
        server.wait_for(lambda seen: len(seen.cancelled) == 1)


def test_generate_tells_a_person_how_fast_it_was(capsys, run_main, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with FakeServer(say("one two three")) as server:
        assert run_main("generate", "x", "--target", server.target) == 0
    shown = capsys.readouterr()
    assert shown.out == "one two three\n"
    assert "3 tokens, time to first token" in shown.err


STEPS = [("a", 0.0), ("b", 0.5), ("a", 0.0), ("b", 0.5)]
EVENTS = [
    Started("executor"),
    Printed("executor", b"{}"),
    Progressed("executor", "loading the model", 0.1),
    Progressed("executor", "loading the model", 0.2),
    Progressed("executor", "loading the model", 0.6),
    Said("executor", Level.INFO, "listening"),
    Said("executor", Level.WARNING, "memory is [short]"),
    BecameReady("executor"),
    Exited("executor", -9, None, 0.0),
    Exited("executor", 1, "no room", 0.4),
    Exited("executor", 3, "no model", None),
    StillRunning("executor", 4.2, 0),
    StillRunning("executor", 4.2, 1),
    StillRunning("executor", 4.2, 3),
]
LAST_LINES = [
    "executor: was killed by signal 9; starting it again now",
    "executor: ended with exit code 1 (no room); starting it again in 0.4 s",
    "executor: still finishing what it runs, for 4 s at most",
    "executor: 1 request still runs, for 4 s at most",
    "executor: 3 requests still run, for 4 s at most",
]


def test_what_is_done_twice_does_not_go_back():
    shown = io.StringIO()
    view = LineView(Console(width=80, color_system=None, file=shown))
    for event in (
        *(Progressed("executor", f"warming up (compile {name})", fraction) for name, fraction in STEPS),
        Started("executor"),
        Progressed("executor", "warming up (compile a)", 0.0),
    ):
        view.on_event(event)
    percents = [int(line.rpartition(" ")[2].removesuffix("%")) for line in shown.getvalue().splitlines() if "%" in line]
    assert percents == [0, 50, 50, 0]


def shown_by(make_view, *, is_terminal):
    """What a view writes about all these events."""
    console = Console(width=80, force_terminal=is_terminal, color_system=None, record=True, file=io.StringIO())
    with make_view(console) as view:
        for number, event in enumerate(EVENTS):
            view.on_event(event)
            if number == EVENTS.index(BecameReady("executor")):
                view.settle()
    return console.export_text()


def test_lines_show_each_step_once():
    assert shown_by(LineView, is_terminal=False).splitlines() == [
        "executor: starting",
        "executor: loading the model  10%",
        "executor: loading the model  60%",
        "executor: memory is [short]",
        "executor: ready",
        *LAST_LINES,
    ]


def test_bars_fit_a_terminal_and_become_lines_when_all_is_ready():
    lines = shown_by(BarView, is_terminal=True).splitlines()
    assert "executor: memory is [short]" in [line.rpartition("0:00:00")[2].strip() for line in lines]
    assert lines[-5:] == LAST_LINES


def test_only_a_child_that_is_ready_is_ticked_off_and_no_more_when_it_starts_again():
    """A phase that is done is not its child's end: the clock goes on. One that was ready and died while others loaded
    has its bar and its clock begin anew.
    """
    with BarView(Console(file=io.StringIO(), force_terminal=True, width=80)) as view:
        view.on_event(Started("executor"))
        view.on_event(Progressed("executor", "loading the model", 1.0))
        (bar,) = view._progress.tasks
        assert not bar.finished
        view.on_event(BecameReady("executor"))
        view.on_event(Exited("executor", -9, None, 0.0))
        assert bar.finished
        view.on_event(Started("executor"))
        assert not bar.finished
        assert (bar.description, bar.completed, bar.finished_time) == ("starting", 0, None)
        view.on_event(BecameReady("executor"))
        assert bar.finished


@pytest.mark.parametrize(
    ("times", "first", "rate"),
    [
        ([], None, None),
        ([(1.5, 1)], 1.5, None),
        ([(0.5, 2), (1.0, 1), (1.25, 2), (1.5, 3)], 0.5, 6.0),
        ([(0.5, 2), (0.502, 22)], 0.5, None),  # a burst says how messages were gathered
        ([(0.5, 1), (0.51, 1), (0.52, 1), (0.53, 1)], 0.5, None),
        ([(0.1, 0), (2.0, 1)], 2.0, None),
    ],
)
def test_speed_is_measured_from_the_first_token(times, first, rate):
    """The rate is of what came after the first delta: decoding alone."""
    now = 10.0
    stopwatch = Stopwatch(lambda: now)
    for seconds, num_tokens in times:
        now = 10.0 + seconds
        stopwatch.tokens_arrived(num_tokens)
    assert stopwatch.time_to_first_token_seconds == first
    assert stopwatch.tokens_per_second == rate
