"""For tests of code that uses the client: a scheduler that plays a script, over a real socket on loopback.

    from paceline_client import Client
    from paceline_client.testing import FakeServer, say

    def test_my_code():
        with FakeServer(say("The capital is Paris.")) as server, Client(server.target) as client:
            assert client.generate("?").text == "The capital is Paris."

A script is a list of steps, played for every request, or a function from the request to its steps.
"""

from paceline_client.testing.script import (
    Break,
    Die,
    Drain,
    End,
    Fail,
    Hold,
    Script,
    Step,
    Tokens,
    echo,
    fail_then,
    say,
    standby,
)
from paceline_client.testing.server import FakeServer

__all__ = [
    "Break",
    "Die",
    "Drain",
    "End",
    "Fail",
    "FakeServer",
    "Hold",
    "Script",
    "Step",
    "Tokens",
    "echo",
    "fail_then",
    "say",
    "standby",
]
