"""`paceline chat` with a model that calls tools: who talks to it types what they gave."""

import pytest
from typer.testing import CliRunner

from paceline_cli.app import app
from paceline_client import FinishReason
from paceline_client.results import ReasoningPart, TextPart, ToolCallPart
from paceline_client.testing import End, FakeServer, Tokens, say


def chatted(script, typed):
    """What a chat with a server that plays a script shows, and the requests that came."""
    with FakeServer(script) as server:
        return CliRunner().invoke(app, ["chat", "--target", server.target], input=typed), server.seen.requests


def calling(request):
    """Thinks and calls two tools for a user, and says what it heard of a tool."""
    last = request.chat.messages[-1]
    if last.role == "tool" or last.content == "thanks":
        return say(f"I heard {last.content}")
    return [
        Tokens((1,), parts=(ReasoningPart("Hm"), TextPart("Let me see."))),
        Tokens((2,), parts=(ToolCallPart(0, '{"town":', id="a1B2c3D4e", name="weather"),)),
        Tokens((3,), parts=(ToolCallPart(0, '"Paris"}'), ToolCallPart(1, "", id="f5G6h7I8j", name="clock"))),
        End(),
    ]


def turns_of(request):
    """Role, content, reasoning, and the calls it makes or the one it answers."""
    return [
        (turn.role, turn.content, turn.reasoning, turn.tool_call_id or [call.name for call in turn.tool_calls])
        for turn in request.chat.messages
    ]


ASKED = ("user", "warm?", "", [])
WEATHER_CALLED = ("assistant", "Let me see.", "Hm", ["weather"])
CLOCK_CALLED = ("assistant", "Let me see.", "Hm", ["clock"])
BOTH_CALLED = ("assistant", "Let me see.", "Hm", ["weather", "clock"])
WARM, NOON = ("tool", "21", "", "a1B2c3D4e"), ("tool", "/noon", "", "f5G6h7I8j")


@pytest.mark.parametrize(
    ("results", "remembered"),
    [
        ("21\n/noon\n", [ASKED, BOTH_CALLED, WARM, NOON, ("assistant", "I heard /noon", "", [])]),
        ("21\n\n", [ASKED, WEATHER_CALLED, WARM, ("assistant", "I heard 21", "", [])]),
        ("\n/noon\n", [ASKED, CLOCK_CALLED, NOON, ("assistant", "I heard /noon", "", [])]),
        ("\n\n", [ASKED, ("assistant", "Let me see.", "Hm", [])]),
        ("21\n/reset\n", []),
        ("21\n/reset\nwarm?\n21\n\n", [ASKED, WEATHER_CALLED, WARM, ("assistant", "I heard 21", "", [])]),
    ],
    ids=["both", "the first", "the last", "none", "it is forgotten", "it is forgotten and asked again"],
)
def test_a_chat_asks_what_each_call_gave_and_goes_on(results, remembered):
    """What is remembered are calls that were answered, with their results."""
    result, (*_, last) = chatted(calling, f"warm?\n{results}thanks\n")
    assert turns_of(last) == [*remembered, ("user", "thanks", "", [])]
    heard = [f"{content}\n" for role, content, *_ in remembered if content.startswith("I heard")]
    called = 'Let me see.\nweather {"town":"Paris"}\nclock \n'
    shown = [called * (1 + results.count("warm?")), *heard, "I heard thanks\n"]
    assert (result.exit_code, result.stdout) == (0, "".join(shown))


@pytest.mark.parametrize("arguments", ['{"town":', "3"], ids=["cut", "no object"])
def test_a_call_that_is_not_whole_is_not_asked_for(arguments):
    cut = [Tokens((1,), parts=(ToolCallPart(0, arguments, id="a1B2c3D4e", name="weather"),)), End(FinishReason.LENGTH)]
    result, requests = chatted(cut, "warm?\nthanks\n")
    assert result.stdout == f"weather {arguments}\n" * 2
    assert [turns_of(request) for request in requests] == [[ASKED], [("user", "thanks", "", [])]]
