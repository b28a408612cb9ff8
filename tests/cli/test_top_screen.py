"""The screen of `paceline top` as a pure function: it fits, whatever it is told, and its figures are right."""

import dataclasses
import math
from collections.abc import Mapping
from itertools import repeat
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from paceline_cli.top.cells import cut, cut_front, harmless, left, right, wrap
from paceline_cli.top.controls import (
    Cancel,
    Controls,
    Drain,
    Explain,
    Quit,
    SetLimit,
    ShowLimits,
    Undrain,
)
from paceline_cli.top.screen import KEYS, draw, plain, tables
from paceline_cli.top.source import admin_target
from paceline_cli.top.state import TopState
from paceline_cli.top.values import (
    Blocks,
    Executor,
    ExecutorState,
    Limits,
    Overview,
    Request,
    RequestKey,
    Step,
    Sums,
)
from paceline_cli.top.window import Window
from paceline_client.errors import InvalidRequestError
from paceline_client.results import RequestState

texts = st.text(max_size=90)  # with everything that Unicode has: controls, wide and combining characters
counts, seconds = st.integers(0, 2**40), st.floats(0, 1e7)
OF_TYPES = {
    str: texts,
    int: counts,
    int | None: st.none() | counts,
    float: seconds,
    float | None: st.none() | seconds,
    bool: st.booleans(),
    ExecutorState: st.sampled_from(ExecutorState),
    RequestState: st.sampled_from(RequestState),
    Mapping[str, int]: st.dictionaries(texts, counts, max_size=3),
}


def drawn(kind, **given):
    """Objects of a class, with anything that its fields may have; nested ones, too."""
    if kind in OF_TYPES:
        return OF_TYPES[kind]
    return st.builds(
        kind, **{name: drawn(hint) for name, hint in get_type_hints(kind).items() if name not in given}, **given
    )


overviews = drawn(
    Overview,
    scheduler_id=st.sampled_from("ab"),
    executors=st.lists(drawn(Executor), max_size=5).map(tuple),
    requests=st.lists(drawn(Request), max_size=8).map(tuple),
)
keys = st.sampled_from(
    ["up", "down", "pagedown", "end", "home", "s", "h", "e", "c", "d", "u", "l", "y", "1", "9", "escape", "enter", "x"]
)


@given(
    first=overviews,
    second=overviews,
    steps=st.lists(st.builds(Step, st.tuples(seconds), st.tuples(st.tuples(seconds, st.integers(1, 9)))), max_size=3),
    trouble=texts,
    pressed=st.lists(keys, max_size=6),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
)
def test_no_line_is_wider_than_the_screen(first, second, steps, trouble, pressed, width, height):
    state, controls = TopState(), Controls()
    for number, overview in enumerate((first, second)):
        state.answered("localhost:50052", overview, float(number))
    for step in steps:
        state.stepped(step, 1.5)
    state.lost(trouble)
    for key in pressed:
        action = controls.press(key, second)
        if isinstance(action, ShowLimits):
            controls.limits = Limits(2**40, 2**40, 2**40)
    lines = draw(state, controls, width, height, 2.0)
    assert len(lines) == height
    shown = ["".join(part.text for part in line) for line in lines]
    assert all(0 <= wcswidth(line) <= width for line in shown)
    listed = ["".join(part.text for part in line) for line in tables(state, controls, width, height, 2.0)]
    assert len(listed) <= height
    assert all(0 <= wcswidth(line) <= width for line in listed)


@given(text=texts, width=st.integers(0, 60))
def test_cells_are_as_wide_as_they_should_be(text, width):
    shown = harmless(text)
    assert wcswidth(cut(shown, width)) <= width
    assert wcswidth(cut_front(shown, width)) <= width
    assert wcswidth(left(shown, width)) == wcswidth(right(shown, width)) == width
    lines = wrap(shown, max(width, 2))
    assert all(wcswidth(line) <= max(width, 2) for line in lines)
    assert "".join("".join(lines).split()) == "".join(shown.split())


def test_a_name_cannot_move_the_cursor():
    """What would is a question mark, and so is what has no width or turns the direction of writing."""
    assert harmless("a\x1b[2Jb\r\n\u202ec\u0301\u200d") == "a?[2Jb???c??"


values = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 50)), max_size=40)


@given(entries=values, share=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_those_of_all_values_one_by_one(entries, share):
    """By the nearest rank: as many values as the share says are no larger."""
    window = Window()
    for value, count in entries:
        window.add(0.0, value, count)
    one_by_one = sorted(one for value, count in entries for one in repeat(value, count))
    expected = one_by_one[max(math.ceil(share * len(one_by_one)), 1) - 1] if one_by_one else None
    assert window.quantiles(1.0, [share]) == (expected,)


def test_old_values_count_no_more():
    """After a minute; and there are never more than the window holds."""
    window = Window(60.0)
    window.add(0.0, 5.0)
    window.add(30.0, 1.0)
    assert window.quantiles(50.0, [1.0]) == (5.0,)
    assert window.quantiles(61.0, [1.0]) == (1.0,)
    assert window.quantiles(91.0, [1.0]) == (None,)


def sums(num_steps, **more):
    """Return sums with 10 ms per step, 8 expected, and 4 tokens."""
    fields = {
        "num_output_tokens": 4 * num_steps,
        "busy_s": 0.010 * num_steps,
        "predicted_s": 0.008 * num_steps,
        "planning_s": 0.0002 * num_steps,
        **more,
    }
    return Sums(num_steps=num_steps, **fields)


ADDRESS = "127.0.0.1:50061"
RUNNING = Request(RequestKey("blue", "request-1"), RequestState.RUNNING, "tiny", ADDRESS, "", 0, 70, 12, 512, age_s=7.0)
WAITING = Request(
    RequestKey("", "request-2"), RequestState.WAITING, "tiny", "", "every row of it is taken (4)", 0, 20, 0, age_s=3.0
)


def overview(num_steps=100, scheduler_id="a", **more):
    """One executor with 4 rows, a request that runs and one that waits."""
    executor = Executor(
        ADDRESS,
        ExecutorState.READY,
        "tiny",
        4,
        4,
        Blocks(200, 100, 50, 50),
        sums(num_steps, starved_s=more.pop("starved_s", 0.0)),
    )
    fields = {
        "executors": (executor,),
        "requests": (WAITING, RUNNING),
        "num_waiting_requests": 1,
        "num_waiting_tokens": 20,
        "refusals": {"QUEUE_FULL": 3},
        "recoveries": {"executor": 1, "stream": 0},
    }
    return Overview(scheduler_id, **{**fields, **more})


def test_a_screen_shows_what_happened_between_two_answers():
    """50 steps in 2 s, of which the executor starved for half of one."""
    state = TopState()
    state.answered("localhost:50052", overview(100), 10.0)
    state.answered("localhost:50052", overview(150, starved_s=0.5), 12.0)
    state.stepped(Step((0.045, 0.120), ((0.006, 98), (0.011, 2)), num_dropped=7), 12.0)
    assert plain(tables(state, Controls(), 80, 24, 12.5)) == (
        "paceline top  localhost:50052  live\n"
        "running 4  waiting 1 (20 tokens)  100 tokens/s\n"
        "ms in 60 s:  first token p50 45.0 p99 120  between tokens p50 6.0 p99 11.0\n"
        "refused QUEUE_FULL 3  recovered executor 1  steps not seen 7\n"
        "\n"
        " EXECUTOR           STATE       ROWS  STEP  PRED PLAN STRV  TOK/S USED CACH FREE\n"
        " 127.0.0.1:50061    ready        4/4  10.0   8.0 0.20  25%    100  25%  25%  50%\n"
        "\n"
        " REQUEST      TENANT   STATE     PROMPT    OUTPUT    AGE ON, WAITS FOR\n"
        " request-1    blue     running       70    12/512     7s 127.0.0.1:50061\n"
        " request-2    -        waiting       20         0     3s every row of it is tak…\n"
    )


def test_what_is_printed_once_says_why_and_since_when_in_full():
    state = TopState()
    lost = dataclasses.replace(
        overview().executors[0],
        state=ExecutorState.LOST,
        lost_for_s=50.6,
        last_error="the plan stream has ended: reset",
    )
    waiting = dataclasses.replace(
        WAITING, waiting_for="no executor of its model is ready; it waits for one to come back"
    )
    state.answered("a:1", overview(executors=(lost,), requests=(waiting, RUNNING)), 10.0)
    lines = plain(tables(state, Controls(), 80, 24, 10.0, in_full=True)).splitlines()
    (place,) = [number for number, line in enumerate(lines) if ADDRESS in line and " lost " in line]
    assert lines[place + 1] == "   lost for 51s: the plan stream has ended: reset"
    (place,) = [number for number, line in enumerate(lines) if "request-2" in line]
    assert lines[place].endswith("3s")
    assert lines[place + 1] == f"   {waiting.waiting_for}"
    assert "…" not in lines[place + 1]


def test_another_scheduler_begins_its_sums_anew():
    """What it has done since is no rate of what the last one did."""
    state = TopState()
    state.answered("a:1", overview(1000, "a"), 1.0)
    state.answered("b:1", overview(1200, "b"), 2.0)
    assert (state.rates, state.tokens_per_s) == ({}, 0)
    state.answered("b:1", overview(1300, "b"), 3.0)
    assert state.tokens_per_s == 400


def test_a_lost_scheduler_leaves_what_was_known_on_the_screen():
    state = TopState()
    state.answered("a:1", overview(), 1.0)
    assert plain(draw(state, Controls(), 80, 24, 9.0)).startswith("paceline top  a:1  as of 8s ago\n")
    state.lost("cannot reach a:1: Connection refused")
    shown = plain(draw(state, Controls(), 80, 24, 9.0))
    assert shown.startswith("paceline top  a:1  lost, looking for the active server: cannot reach a:1: Conne…\n")
    assert "request-1" in shown


def test_the_selected_request_stays_in_sight_among_many():
    many = tuple(
        dataclasses.replace(WAITING, key=RequestKey("", f"waiting-{number}"), queue_position=number)
        for number in range(50)
    )
    state, controls = TopState(), Controls()
    state.answered("a:1", overview(requests=many), 1.0)
    for _ in range(40):
        controls.press("down", state.overview)
    lines = draw(state, controls, 80, 24, 1.0)
    (selected,) = [line for line in lines if line and line[0].style == "selected"]
    assert selected[0].text.startswith(">waiting-38")
    shown = [line for line in plain(lines).splitlines() if line[1:].startswith("waiting-") and "waits" not in line]
    first = int(shown[0].split()[0].removeprefix("waiting-")) + 1
    assert f" ON, FOR {first}-{first + len(shown) - 1} of 50\n" in plain(lines)
    assert "waiting-38 of tiny: waits for: every row of it is taken (4)" in plain(lines)
    assert plain(lines).rstrip().endswith(KEYS)


def pressed(controls, *typed):
    """Press keys; returns what the last one asks for."""
    return [controls.press(key, overview()) for key in typed][-1]


def test_keys_act_on_what_is_selected():
    controls = Controls()
    assert pressed(controls, "e") is None
    assert controls.note == ("Select a request first, with up and down.",)
    assert pressed(controls, "down", "down", "e") == Explain(RUNNING.key)
    assert pressed(controls, "down", "enter") == Explain(WAITING.key)
    assert pressed(controls, "d") is None
    assert controls.note == ("Select an executor first, with up and down.",)
    assert pressed(controls, "q") == Quit()


@pytest.mark.parametrize(
    ("select", "key", "action"),
    [("end", "c", Cancel(WAITING.key)), ("home", "d", Drain(ADDRESS)), ("home", "u", Undrain(ADDRESS))],
)
def test_what_changes_something_is_asked_first(select, key, action):
    """Only a y does it."""
    controls = Controls()
    assert pressed(controls, select, key) is None
    assert controls.note[0].endswith("y: yes")
    assert pressed(controls, "n") is None
    assert controls.note == ("Nothing was changed.",)
    assert pressed(controls, "y") is None
    assert pressed(controls, key, "y") == action


def test_a_limit_is_typed():
    controls = Controls()
    assert pressed(controls, "l") == ShowLimits()
    controls.limits = Limits(1024, 4096, 512)
    assert pressed(controls, "1", "7", "q", "8", "backspace", "0", "enter") == SetLimit("max_num_queued_reqs", 70)
    assert pressed(controls, "2", "7", "escape") is None
    assert pressed(controls, "3", "enter") is None
    assert controls.typing is None


def test_requests_of_one_kind_can_be_shown_alone():
    controls, found = Controls(), []
    for _ in range(4):
        found.append([request.key.request_id for request in controls.requests(overview())])
        pressed(controls, "s")
    assert found == [["request-1", "request-2"], ["request-2"], ["request-1"], ["request-1", "request-2"]]


@pytest.mark.parametrize(
    ("target", "admin"),
    [
        ("localhost:50051", "localhost:50052"),
        ("a:50051, b:50054", "a:50052,b:50055"),
        ("dns:///paceline:50051", "dns:///paceline:50052"),
        ("[::1]:7", "[::1]:8"),
        ("somewhere", "somewhere"),
        ("[::1]", "[::1]"),
    ],
)
def test_an_admin_port_follows_that_of_the_api(target, admin):
    assert admin_target(target) == admin


def test_a_target_without_a_port_that_could_be_followed_is_told():
    with pytest.raises(InvalidRequestError, match="--admin-target"):
        admin_target("unix:/run/paceline")
