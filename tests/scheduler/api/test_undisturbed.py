"""Over any number of streams a client gets what one undisturbed stream would have brought."""

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from edge_rig.edge_client import scripted_edge
from edge_rig.returning_client import ReturningClient
from edge_rig.tiny import END, MODEL, TOKENIZER, encode
from paceline.plan.values import FinishReason
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.limits import EdgeLimits

# Tokens that make characters, stop texts, special tokens and ends lie across every border.
LETTERS = (*encode("ab€ab€ab"), TOKENIZER.token_to_id("<|im_start|>"), END)
outputs = st.lists(st.sampled_from(LETTERS), min_size=4, max_size=16)
requests = st.builds(
    lambda stop, stop_token_ids, kept, min_tokens, interval, skip: GenerateRequest(
        request_id="r1",
        text="hi",
        stopping={
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "include_stop_str_in_output": kept,
            "min_tokens": min_tokens,
        },
        output={"stream_interval": interval, "skip_special_tokens": skip},
    ),
    st.lists(st.sampled_from(["ab€b", "b€ab", "€aa", "ba€", "aab", "a\ufffd"]), max_size=3),
    st.sampled_from([[], [], encode("b")]),
    st.booleans(),
    st.integers(0, 6),
    st.integers(1, 4),
    st.booleans(),
)


def generated(token_ids, stopping):
    """What an executor makes of these tokens, up to the first that ends it or all it may have, and which it was."""
    ends = (END, *stopping.stop_token_ids)
    for number, token_id in enumerate(token_ids, start=1):
        if token_id in ends and number > stopping.min_tokens:
            return token_ids[:number], FinishReason.STOP
    return token_ids, FinishReason.LENGTH


@dataclass(frozen=True)
class Visit:
    """One stream: how many tokens it brings that are read and that are not, how many follow unheard, and what then."""

    num_read: int
    num_unread: int
    num_unheard: int
    comes_back: str


visits = st.lists(
    st.builds(
        Visit,
        st.integers(1, 5),
        st.integers(0, 2),
        st.integers(0, 3),
        st.sampled_from(["with its tokens", "with their hash", "to a scheduler that knows nothing"]),
    ),
    min_size=1,
    max_size=4,
)


class Generation:
    """A request whose output is known beforehand, and its client."""

    def __init__(self, edge, request, token_ids):
        self.client, self._backend, self._position = ReturningClient(edge, request), edge.backend, 0
        self._token_ids, self._reason = generated(token_ids, request.stopping)

    def steps(self, count):
        """Generate so many tokens, as far as there are any; the last one ends the output."""
        for _ in range(min(count, len(self._token_ids) - self._position)):
            handle, self._position = self.client.handle, self._position + 1
            finished = {handle: self._reason} if self._position == len(self._token_ids) else {}
            self._backend.step({handle: [self._token_ids[self._position - 1]]}, finished)

    @property
    def is_over(self):
        """Whether the client has the end."""
        return self.client.copy.finish is not None

    async def visit(self, visit):
        """One stream of the client from its middle to that of the next."""
        for _ in range(visit.num_read):  # so that larger deltas come in different sizes
            self.steps(1)
            self.client.read()
            if self.is_over:
                return
        self.steps(visit.num_unread)
        self.client.call.leave()
        self.steps(visit.num_unheard)
        if visit.comes_back == "to a scheduler that knows nothing":
            self._backend.forget_everything()
            self._position = len(self.client.copy.token_ids)
        await self.client.come(self.client.claim(prior=visit.comes_back != "with their hash"))


async def everything(request, token_ids, visits):
    """What a client has in the end of a request whose output is these tokens."""
    async with scripted_edge(MODEL, EdgeLimits()) as edge:
        edge.backend.num_cached_tokens = 2  # as of an output that the device ends
        generation = Generation(edge, request, token_ids)
        await generation.client.come()
        for visit in visits:
            if generation.is_over:
                break
            await generation.visit(visit)
        generation.steps(len(token_ids))
        generation.client.read()
        copy = generation.client.copy
        return copy.text, copy.token_ids, copy.finish


@given(requests, outputs, visits)
def test_whatever_happens_on_the_way_the_client_has_the_same_in_the_end(request, token_ids, visits):
    """Streams end read or unread, output is generated while nobody listens, scheduler and executor are lost."""
    undisturbed = asyncio.run(everything(request, token_ids, ()))
    assert undisturbed[2] is not None
    assert asyncio.run(everything(request, token_ids, visits)) == undisturbed
