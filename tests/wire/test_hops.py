"""A request and its token pass few functions between a client's call and a runner, and have few forms."""

import dataclasses
from types import FunctionType

import pytest

from both_sides.hops import REQUEST_FORMS, Follower, follow, followed_by
from paceline_client.requests import Text
from paceline_scheduler.core.request import Request
from paceline_scheduler.testing.requests import make_request

MAX_REQUEST_FUNCTIONS, MAX_REQUEST_FORMS = 104, 16
MAX_TOKEN_FUNCTIONS, MAX_TOKEN_FORMS = 50, 14


@pytest.fixture(scope="module")
def ways():
    return follow()


def test_the_way_of_a_request_is_short(ways):
    request, _ = ways
    assert len(request.functions) <= MAX_REQUEST_FUNCTIONS, "\n".join(request.functions)
    assert len(request.forms) <= MAX_REQUEST_FORMS


def test_the_way_of_a_token_is_short(ways):
    _, token = ways
    assert len(token.functions) <= MAX_TOKEN_FUNCTIONS, "\n".join(token.functions)
    assert len(token.forms) <= MAX_TOKEN_FORMS


def test_the_lists_of_forms_are_whole(ways):
    for way in ways:
        assert (way.unseen, way.unlisted) == (set(), set())


def test_both_ways_have_both_ends(ways):
    request, token = (list(way.functions) for way in ways)
    assert request[0] == "paceline_client.async_client:AsyncClient.stream"
    assert request[-1] == "paceline_executor.link.engine:Engine._start"
    assert "paceline_executor.link.engine:Engine._wait" in token
    assert token[-1] == "paceline_client.inbox:Inbox.get"


def as_product(function, **names):
    """The function, as if the client library had it."""
    return FunctionType(function.__code__, {"__name__": "paceline_client.made_up", **names}, function.__name__)


def seen_of(function, *given):
    follower = Follower()
    follower.request.is_open = True
    with followed_by(follower):
        function(*given)
    return follower.request


def names_of(way):
    return [name.partition(":")[2] for name in way.functions]


def looks(request):
    return request.handle


def hands_on(request):
    return looks(request)


def begins(request):
    return hands_on(request)


def converts(request):
    return [Text(str(request.handle))]


def sums(number):
    return looks(number)


def test_who_hands_on_counts_and_who_looks_does_not():
    middle = as_product(hands_on, looks=as_product(looks))
    assert names_of(seen_of(as_product(begins, hands_on=middle), make_request())) == ["begins", "hands_on"]
    assert names_of(seen_of(as_product(looks), make_request())) == []


def test_who_returns_another_form_hands_on():
    assert names_of(seen_of(as_product(converts, Text=Text, str=str), make_request())) == ["converts"]


def test_functions_of_other_values_and_of_others_do_not_count():
    number = dataclasses.make_dataclass("Number", ["handle"])(7)
    assert names_of(seen_of(as_product(sums, looks=as_product(looks)), number)) == []
    assert names_of(seen_of(begins, make_request())) == []


def test_a_bag_that_nobody_listed_is_found():
    bag = dataclasses.make_dataclass("Bag", ["handle"], frozen=True)
    assert Request in REQUEST_FORMS
    assert seen_of(as_product(looks), bag(make_request())).unlisted == {bag}
