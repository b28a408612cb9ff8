"""The screen of `paceline top` as a pure function: it fits, whatever it is told, and its figures are right."""

import dataclasses
import math
import re
from collections.abc import Mapping
from itertools import repeat
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from paceline_cli.top.screen import KEYS, SHOWN, View, live_screen, whole_screen
from paceline_cli.top.state import TopState
from paceline_cli.top.values import ActiveRequest, Blocks, Executor, ExecutorState, Overview, RequestKey, Step, Sums
from paceline_cli.top.window import Window
from paceline_client.addresses import admin_target
from paceline_client.errors import InvalidRequestError
from paceline_client.results import Explanation, RequestState, Times

# With everything that Unicode has, controls, wide and combining characters; but terminals disagree on halves of flags.
texts = st.text(st.characters(exclude_characters=[chr(code) for code in range(0x1F1E6, 0x1F200)]), max_size=90)
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
    Times | None: st.none(),
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
    requests=st.lists(drawn(ActiveRequest), max_size=8).map(tuple),
)


def shown(screen):
    """Return the lines of a screen without their colours."""
    return re.sub("\x1b\\[[0-9;]*m", "", screen).split("\n")


@given(
    first=overviews,
    second=overviews,
    steps=st.lists(st.builds(Step, st.tuples(seconds), st.tuples(st.tuples(seconds, st.integers(1, 9)))), max_size=3),
    trouble=texts,
    note=st.lists(texts, max_size=3),
    kind=st.sampled_from(list(SHOWN)),
    place=st.integers(0, 12),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
)
def test_no_line_is_wider_than_the_screen(first, second, steps, trouble, note, kind, place, width, height):
    """And there are as many as it has; nothing else that is told moves the cursor."""
    state = TopState()
    for number, overview in enumerate((first, second)):
        state.answered("localhost:50052", overview, float(number))
    for step in steps:
        state.stepped(step, 1.5)
    state.lost(trouble)
    items = [*(one.address for one in second.executors), *(one.key for one in second.requests), None]
    lines = shown(live_screen(state, View(items[place % len(items)], kind, note), width, height, 2.0))
    assert len(lines) == height
    assert all(0 <= wcswidth(line) <= width for line in lines)
    printed = shown(whole_screen(state, width, 2.0, is_terminal=True))
    assert all(0 <= wcswidth(line) <= max(width, 80) for line in printed)


def test_a_name_cannot_move_the_cursor():
    """What would is a question mark, and so is what has no width or turns the direction of writing."""
    state = TopState()
    state.answered("a\x1b[2Jb\r\n\u202ec\u0301\u200d", Overview(), 1.0)
    assert whole_screen(state, 80, 1.0, is_terminal=False).startswith("paceline top  a?[2Jb???c??  live\n")


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


WHY = "no executor of its model is ready; it waits for one to come back"
RUNNING = ActiveRequest(
    RequestKey("blue", "request-1"),
    Explanation(RequestState.RUNNING, "", 0, 0, "", ADDRESS, 70, 12),
    "tiny",
    70,
    512,
    7.0,
)
WAITING = ActiveRequest(
    RequestKey("", "request-2"), Explanation(RequestState.WAITING, WHY, 1, 0, "", "", 0, 0), "tiny", 20, None, 3.0
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
    """50 steps in 2 s, of which the executor starved for half of one. Nobody selects what is printed: it is whole."""
    state = TopState()
    state.answered("localhost:50052", overview(100), 10.0)
    state.answered("localhost:50052", overview(150, starved_s=0.5), 12.0)
    state.stepped(Step((0.045, 0.120), ((0.006, 98), (0.011, 2)), num_dropped=7), 12.0)
    assert whole_screen(state, 80, 12.5, is_terminal=False).splitlines() == [
        "paceline top  localhost:50052  live",
        "running 4  waiting 1 (20 tokens)  100 tokens/s",
        "ms in 60 s:  first token p50 45.0 p99 120  between tokens p50 6.0 p99 11.0",
        "refused QUEUE_FULL 3  recovered executor 1  steps not seen 7",
        "",
        " EXECUTOR        STATE     ROWS  STEP  PRED PLAN STRV  TOK/S USED CACH FREE",
        " 127.0.0.1:50061 ready      4/4  10.0   8.0 0.20  25%    100  25%  25%  50%",
        " 127.0.0.1:50061: tiny",
        "",
        " REQUEST     TENANT   STATE     PROMPT  OUTPUT  AGE ON, WAITS FOR",
        " request-1   blue     running       70  12/512   7s 127.0.0.1:50061",
        " request-2   -        waiting       20       0   3s no executor of its model is",
        "                                                    ready; it waits for one to",
        "                                                    come back",
    ]


def test_a_lost_executor_says_why_and_since_when():
    (ready,) = overview().executors
    lost = dataclasses.replace(
        ready, state=ExecutorState.LOST, lost_for_s=50.6, last_error="the plan stream has ended: reset"
    )
    state = TopState()
    state.answered("a:1", overview(executors=(lost,)), 10.0)
    why = f"{ADDRESS}: tiny; lost for 51s: the plan stream has ended: reset"
    assert f" {why}" in shown(whole_screen(state, 80, 10.0, is_terminal=True))
    assert why in shown(live_screen(state, View(ADDRESS), 80, 24, 10.0))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_is_printed_is_cut_nowhere(width):
    """What has no place in a line goes on below."""
    name = "0123456789" * 4
    state = TopState()
    state.answered("a:1", overview(requests=(dataclasses.replace(WAITING, key=RequestKey("", name)),)), 1.0)
    lines = shown(whole_screen(state, width, 1.0, is_terminal=False))
    (heading,) = [place for place, line in enumerate(lines) if line.startswith(" REQUEST")]
    tenant, why = (lines[heading].index(title) for title in ("TENANT", "ON, WAITS FOR"))
    assert "".join(line[:tenant].strip() for line in lines[heading + 1 :]) == name
    assert " ".join(line[why:] for line in lines[heading + 1 :]).strip() == WHY


def test_another_scheduler_begins_its_sums_anew():
    """What it has done since is no rate of what the last one did."""
    state = TopState()
    state.answered("a:1", overview(1000, "a"), 1.0)
    state.answered("b:1", overview(1200, "b"), 2.0)
    assert state.tokens_per_s == 0
    state.answered("b:1", overview(1300, "b"), 3.0)
    assert state.tokens_per_s == 400


def test_a_lost_scheduler_leaves_what_was_known_on_the_screen():
    state = TopState()
    state.answered("a:1", overview(), 1.0)
    assert shown(live_screen(state, View(), 80, 24, 9.0))[0].rstrip() == "paceline top  a:1  as of 8s ago"
    state.lost("cannot reach a:1: Connection refused")
    lines = shown(live_screen(state, View(), 80, 24, 9.0))
    assert lines[0] == "paceline top  a:1  lost, looking for the active server: cannot reach a:1: Conne…"
    assert any("request-1" in line for line in lines)


def test_the_selected_request_stays_in_sight_among_many():
    many = tuple(
        ActiveRequest(
            RequestKey("", f"waiting-{number}"), dataclasses.replace(WAITING.explanation, queue_position=number), "tiny"
        )
        for number in range(50)
    )
    state = TopState()
    state.answered("a:1", overview(requests=many), 1.0)
    lines = shown(live_screen(state, View(many[38].key), 80, 24, 1.0))
    listed = [line.split()[0] for line in lines if line[1:].startswith("waiting-") and " waiting " in line]
    first = int(listed[0].removeprefix("waiting-")) + 1
    assert ">waiting-38" in listed
    assert any(f" REQUEST {first}-{first + len(listed) - 1}/50 " in line for line in lines)
    assert "waiting-38 of tiny: waits for: no executor of its model is ready; it waits for" in map(str.rstrip, lines)
    assert lines[-1].rstrip() == KEYS


def test_requests_of_one_kind_can_be_shown_alone():
    found = [[one.key.request_id for one in View(shown=kind).requests(overview())] for kind in SHOWN]
    assert found == [["request-1", "request-2"], ["request-2"], ["request-1"]]


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
