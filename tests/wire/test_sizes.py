"""What one side may send the other side takes, whatever its size."""

from dataclasses import replace

from paceline.v1 import inference_pb2, plan_pb2
from paceline_executor.link import service as executor_service
from paceline_executor.link.wire import decode_request
from paceline_executor.rows import limits
from paceline_executor.rows.limits import MAX_CONTEXT_BYTES
from paceline_scheduler.api import texts, validation
from paceline_scheduler.api.validation import MAX_ORIGIN_BYTES
from paceline_scheduler.core.plan import BatchPlan, NewRequest
from paceline_scheduler.link import transport_grpc
from paceline_scheduler.link.wire import encode_message
from paceline_scheduler.simulator import server as simulator
from paceline_scheduler.testing.requests import column, make_request


def test_a_plan_may_be_as_large_for_the_simulator_as_for_an_executor():
    """And as large as the scheduler sends it."""
    assert simulator.MAX_MESSAGE_BYTES == executor_service.MAX_MESSAGE_BYTES == transport_grpc.MAX_MESSAGE_BYTES


def test_lists_that_the_scheduler_takes_the_executor_takes():
    """Of each bad word there are several ways to spell it."""
    assert validation.MAX_LOGIT_BIASES == limits.MAX_LOGIT_BIASES
    assert validation.MAX_ALLOWED_TOKEN_IDS == limits.MAX_ALLOWED_TOKENS
    assert texts.NUM_WAYS_TO_SPELL * validation.MAX_BAD_WORDS == limits.MAX_BAD_WORDS
    assert texts.MAX_BAD_WORD_TOKENS == limits.MAX_BAD_WORD_TOKENS


def test_what_the_scheduler_stores_of_the_largest_request_is_kept_by_the_executor():
    """An executor would fail a request whose context it cannot keep."""
    largest = inference_pb2.GenerateRequest(model="x" * (MAX_ORIGIN_BYTES - 4)).SerializeToString()
    assert len(largest) == MAX_ORIGIN_BYTES
    placement = NewRequest(
        row=0,
        request=replace(make_request(1, 1, deadline_s=1e9), origin=largest, body_digest=b"d" * 16),
        attempt=2**31,
        output_token_ids=column(),
        max_tokens=1,
        num_cached_tokens=0,
        num_prompt_cached_tokens=2**31,
        num_preemptions=2**31,
        num_executor_deaths=2**31,
        waited_s=1e9 + 0.125,
    )
    plan = BatchPlan(1, 1, 1, column(), column(), 0, placements=(placement,))
    (sent,) = decode_request(plan_pb2.AttachRequest.FromString(encode_message(plan)))
    assert MAX_ORIGIN_BYTES < len(sent.placements[0].context) <= MAX_CONTEXT_BYTES
