"""A request that comes back: its tokens are taken from what runs, where that is the same request."""

import numpy as np
import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.testing.edge_client import scripted_edge
from paceline_scheduler.testing.requests import make_request
from paceline_scheduler.testing.returning_client import ReturningClient
from paceline_scheduler.testing.tiny import MODEL, TOKENIZER


@pytest.fixture
async def edge():
    """An edge over a scripted backend with one model."""
    async with scripted_edge(MODEL, EdgeLimits()) as edge:
        yield edge


@pytest.mark.parametrize("bad_words", [(), ("bye",)])
async def test_what_a_request_that_is_known_says_is_not_tokenised_again(edge, monkeypatch, bad_words):
    request = GenerateRequest(request_id="r1", text="hi", sampling={"bad_words": bad_words})
    client = ReturningClient(edge, request)
    await client.come()
    first = edge.backend.asked.requests[client.handle]

    async def refuse(*_):
        raise AssertionError("the backend has the tokens")

    for name in ("token_ids", "bad_word_token_ids"):
        monkeypatch.setattr(edge.texts, name, refuse)
    await client.come()
    again = edge.backend.asked.resumed[-1]
    assert again.prompt_token_ids.tolist() == TOKENIZER.encode("hi").ids
    assert again.bad_words == first.bad_words
    assert bool(again.bad_words) == bool(bad_words)


def test_a_successor_knows_what_runs_by_key_and_body():
    harness = CoreHarness(make_executor())
    request = make_request(prompt=5, max_tokens=8, is_resumable=True)
    harness.submit(request)
    harness.step()
    harness.succeed()
    found = harness.views.known(request.key, request.body_digest, request.model)
    assert found is not None
    assert np.array_equal(found.prompt_token_ids, request.prompt_token_ids)
    assert harness.views.known(request.key, b"another body", request.model) is None
    assert harness.views.known(make_request().key, request.body_digest, request.model) is None
    # A body that names no model meant the only one there was.
    assert harness.views.known(request.key, request.body_digest, "another model") is None
