"""What one side may send the other side takes, whatever its size."""

from dataclasses import replace

from paceline.plan.codec import decode_request, encode_request
from paceline.plan.values import BatchPlan
from paceline.v1 import inference_pb2
from paceline_executor import limits
from paceline_executor.limits import MAX_CONTEXT_BYTES
from paceline_executor.link import service as executor_service
from paceline_scheduler.api import validation
from paceline_scheduler.api.text import texts
from paceline_scheduler.api.validation import MAX_ORIGIN_BYTES
from paceline_scheduler.link import transport_grpc
from paceline_scheduler.link.wire_contexts import with_contexts
from scheduler_rig.requests import make_placement, make_request


def test_a_plan_may_be_as_large_as_the_scheduler_sends_it():
    assert executor_service.MAX_MESSAGE_BYTES == transport_grpc.MAX_MESSAGE_BYTES


def test_lists_that_the_scheduler_takes_the_executor_takes():
    assert validation.MAX_LOGIT_BIASES == limits.MAX_LOGIT_BIASES
    assert validation.MAX_ALLOWED_TOKEN_IDS == limits.MAX_ALLOWED_TOKENS
    assert texts.NUM_WAYS_TO_SPELL * validation.MAX_BAD_WORDS == limits.MAX_BAD_WORDS
    assert texts.MAX_BAD_WORD_TOKENS == limits.MAX_BAD_WORD_TOKENS


def test_what_the_scheduler_stores_of_the_largest_request_is_kept_by_the_executor():
    """An executor would fail a request whose context it cannot keep."""
    largest = inference_pb2.GenerateRequest(model="x" * (MAX_ORIGIN_BYTES - 4)).SerializeToString()
    assert len(largest) == MAX_ORIGIN_BYTES
    placement = make_placement(
        0,
        replace(make_request(1, 1, deadline_s=1e9), origin=largest, body_digest=b"d" * 16),
        2**31 - 1,
        num_preemptions=2**31 - 1,
        num_executor_deaths=2**31 - 1,
        num_prompt_cached_tokens=2**31 - 1,
        waited_s=1e9 + 0.125,
        deadline_left_s=1e9,
    )
    (sent,) = decode_request(encode_request(with_contexts(BatchPlan(1, 1, 1, new_requests=(placement,)))))
    assert MAX_ORIGIN_BYTES < len(sent.new_requests[0].context) <= MAX_CONTEXT_BYTES
