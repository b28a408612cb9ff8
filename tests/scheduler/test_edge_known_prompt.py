"""The prompt of a request that comes back: taken from what runs, where that is the same request."""

import numpy as np
import pytest

from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.testing.edge_client import scripted_edge
from paceline_scheduler.testing.harness import CoreHarness
from paceline_scheduler.testing.requests import make_executor, make_request
from paceline_scheduler.testing.returning_client import ReturningClient
from paceline_scheduler.testing.tokenizers import byte_level_tokenizer, served_model, tokenizer_source

TOKENIZER = byte_level_tokenizer()
MODEL = served_model(tokenizer_source(TOKENIZER, eos_token="<|im_end|>"))


@pytest.fixture
async def edge():
    """An edge over a scripted backend with one model."""
    async with scripted_edge(MODEL, EdgeLimits()) as edge:
        yield edge


async def test_the_prompt_of_a_request_that_is_known_is_not_made_again(edge, monkeypatch):
    """All clients of a scheduler that died come at once, and a template may write another date today."""
    client = ReturningClient(edge)
    await client.come()

    async def refuse(*_):
        raise AssertionError("the backend has the prompt")

    monkeypatch.setattr(edge.texts, "token_ids", refuse)
    await client.come()
    assert edge.backend.resumptions[-1].request.prompt_token_ids.tolist() == TOKENIZER.encode("hi").ids


def test_a_successor_knows_the_prompts_of_what_runs_by_key_and_body():
    """Another request of the same name, which is refused or begun, is tokenised like any other."""
    harness = CoreHarness(make_executor())
    request = make_request(prompt=5, max_tokens=8, is_resumable=True)
    harness.submit(request)
    harness.step()
    harness.succeed()
    found = harness.core.prompt_of(request.key, request.body_digest, request.model)
    assert found is not None
    assert np.array_equal(found, request.prompt_token_ids)
    assert harness.core.prompt_of(request.key, b"another body", request.model) is None
    assert harness.core.prompt_of(make_request().key, request.body_digest, request.model) is None
    # A body that names no model meant the only one there was.
    assert harness.core.prompt_of(request.key, request.body_digest, "another model") is None
