"""Executors are found from a list or a name, come and go, and what was typed wrong is said in a sentence."""

import pytest

from paceline_scheduler.link.discovery import Discovery, Endpoint, parse_executors


def test_addresses_names_and_ipv6_are_understood():
    found = parse_executors("a:1, [::1]:2,dns:///executors.default.svc:50061")
    assert found.fixed == (Endpoint("a", 1), Endpoint("::1", 2))
    assert found.names == (Endpoint("executors.default.svc", 50061),)
    assert str(Endpoint("::1", 2)) == "[::1]:2"


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:1,a:1", "dns:///a", "a:1,,b:2"])
def test_a_mistyped_address_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"host:port|twice"):
        parse_executors(text)


async def test_a_name_that_cannot_be_resolved_keeps_its_last_answer():
    answers = [("10.0.0.2", "10.0.0.1"), OSError("no DNS"), ("10.0.0.3",)]

    async def resolver(name, port):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    discovery = Discovery(parse_executors("dns:///x:7"), resolver)
    assert await discovery.look() == ("10.0.0.2:7", "10.0.0.1:7")
    assert await discovery.look() == ("10.0.0.2:7", "10.0.0.1:7")
    assert "no DNS" in discovery.last_error
    assert await discovery.look() == ("10.0.0.3:7",)
    assert discovery.last_error == ""
