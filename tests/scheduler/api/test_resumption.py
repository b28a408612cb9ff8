"""What a client says when it comes back: what is taken, what is refused by name, and what makes a request the same."""

import pytest

from edge_rig.tokenizers import served_model
from paceline.plan.durations import write_duration
from paceline.v1 import inference_pb2 as pb
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.resumption import body_of, check_resumption, claimed_end
from paceline_scheduler.api.validation import check_context, validate
from paceline_scheduler.errors import DeadlineExceededError, InvalidRequestError

MODEL = served_model()
NOTHING = 0xCBF29CE484222325


def resumption(n=None, max_tokens=None, **fields):
    """What is made of the fields with which a client comes back."""
    request = pb.GenerateRequest(
        request_id="r1", text="hello", sampling={"n": n}, stopping={"max_tokens": max_tokens}, **fields
    )
    return check_resumption(request, n or 1, MODEL.max_model_len, MODEL.vocab_size)


def deadline_s(timeout_s, waited_s, max_seconds=None):
    """When a request must have ended that comes at 10 s."""
    timeout = None if timeout_s is None else write_duration(timeout_s)
    request = pb.GenerateRequest(request_id="r1", text="hello", timeout=timeout, waited=write_duration(waited_s))
    return validate(request, (MODEL,), 10.0, max_seconds, EdgeLimits())[0].deadline_s


def point(index, resume_from=0, resume_hash=0, last_attempt=0, prior=()):
    """What is held of one completion; 0 is as good as unset."""
    return pb.ResumePoint(
        index=index,
        resume_from=resume_from,
        resume_hash=resume_hash,
        last_attempt=last_attempt,
        prior_output_token_ids=prior,
    )


def hash_by_the_rule(*token_ids):
    """What the comment of paceline.v1.Delta.rolling_hash says."""
    value = 0xCBF29CE484222325
    for token_id in token_ids:
        value = ((value ^ token_id) * 0x100000001B3) % 2**64
        value ^= value >> 32
    return value


def held(point):
    """What a client holds of a completion, in values that can be compared."""
    prior = point.prior_output_token_ids
    return point.resume_from, point.resume_hash, point.last_attempt, None if prior is None else prior.tolist()


def test_a_request_that_comes_first_holds_nothing():
    valid = resumption()
    assert not valid.is_begun
    assert [held(point) for point in valid.points] == [(0, hash_by_the_rule(), 0, None)]
    assert not resumption(resumable=True).is_begun


@pytest.mark.parametrize(
    "fields",
    [
        {"attachment": 2},
        {"resume_from": 1, "resume_hash": 5},
        {"prior_output_token_ids": (7,)},
        {"n": 2, "resume_finished": True},
    ],
)
def test_a_client_that_says_so_has_begun_the_request(fields):
    assert resumption(**fields).is_begun
    assert resumption(resumable=True, **fields).is_begun


def test_what_is_held_is_told_by_tokens_or_by_their_hash():
    whole = (3, hash_by_the_rule(7, 8, 9), 2, [7, 8, 9])
    tokens = {"prior_output_token_ids": (7, 8, 9), "last_attempt": 2}
    assert held(resumption(**tokens).points[0]) == whole
    assert held(resumption(resume_from=3, resume_hash=whole[1], **tokens).points[0]) == whole
    assert held(resumption(resume_from=3, resume_hash=77).points[0]) == (3, 77, 0, None)


def test_each_completion_has_a_point_of_its_own():
    points = (point(2, 1, 55, 4), point(1, 2, 0, 0, (7, 8)))
    taken = resumption(n=4, resume_from=0, resume_points=points).points
    assert [held(each) for each in taken] == [
        (0, hash_by_the_rule(), 0, None),
        (2, hash_by_the_rule(7, 8), 0, [7, 8]),
        (1, 55, 4, None),
        (0, hash_by_the_rule(), 0, None),
    ]


def test_a_client_says_of_each_completion_whether_it_has_the_finish():
    finished = pb.ResumePoint(index=2, resume_finished=True)
    assert resumption(n=3).is_finished == (False, False, False)
    assert resumption(n=3, resume_finished=True, resume_points=(finished,)).is_finished == (True, False, True)
    for fields in ({}, {"n": 2, "resume_points": (pb.ResumePoint(index=1, resume_finished=True),)}):
        with pytest.raises(InvalidRequestError) as caught:
            resumption(resume_finished=True, **fields)
        assert caught.value.field == "resume_finished"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resume_from": 3}, "resume_hash"),
        ({"resume_hash": 5}, "resume_hash"),
        ({"resume_from": 0, "resume_hash": 5}, "resume_hash"),
        ({"prior_output_token_ids": (7, 8), "resume_hash": 5}, "resume_hash"),
        ({"prior_output_token_ids": (7, 8), "resume_from": 1}, "prior_output_token_ids"),
        ({"prior_output_token_ids": (7, 8), "resume_from": 3}, "prior_output_token_ids"),
        ({"prior_output_token_ids": (7, 8), "resume_from": 0}, "prior_output_token_ids"),
        ({"prior_output_token_ids": (7, -1)}, "prior_output_token_ids[1]"),
        ({"prior_output_token_ids": (400,)}, "prior_output_token_ids[0]"),
        ({"prior_output_token_ids": (7,) * 6, "max_tokens": 5}, "prior_output_token_ids"),
        ({"resume_from": 6, "resume_hash": 5, "max_tokens": 5}, "resume_from"),
        ({"resume_points": (point(1),) * 3}, "resume_points"),
        ({"resume_points": (point(0),)}, "resume_points[0].index"),
        ({"resume_points": (point(3),)}, "resume_points[0].index"),
        ({"resume_points": (point(2), point(2))}, "resume_points[1].index"),
        ({"resume_points": (point(1), point(2, 257, 5))}, "resume_points[1].resume_from"),
        ({"resume_points": (point(1, 3),)}, "resume_points[0].resume_hash"),
        ({"resume_points": (point(1, 1, 5, 0, (7,)),)}, "resume_points[0].resume_hash"),
        ({"resume_points": (point(1, 0, 0, 2**31),)}, "resume_points[0].last_attempt"),
        ({"resume_points": (point(1, 0, 0, 0, (7,)),)}, "resume_points[0].prior_output_token_ids"),
        ({"resume_points": (point(1, 1, 0, 0, (400,)),)}, "resume_points[0].prior_output_token_ids[0]"),
    ],
)
def test_a_claim_that_cannot_be_is_refused_by_the_name_of_its_field(fields, field):
    with pytest.raises(InvalidRequestError) as caught:
        resumption(**({"n": 3} | fields))
    assert caught.value.field == field


def test_output_that_is_held_must_fit_behind_the_prompt():
    """A context that is just full is fine: its client lacks only the end."""
    valid = resumption(resume_from=250, resume_hash=5)
    check_context(6, valid, MODEL)
    with pytest.raises(
        InvalidRequestError, match="is 250, but 7 prompt tokens leave room for 249 output tokens"
    ) as caught:
        check_context(7, valid, MODEL)
    assert caught.value.field == "resume_from"


def test_what_a_request_has_waited_counts_against_its_timeout_but_not_against_its_call():
    """The timeout began when it was first sent, the call only now."""
    assert deadline_s(5.0, 4.0) == 11.0
    assert deadline_s(5.0, 4.0, max_seconds=0.5) == 10.5
    assert deadline_s(None, 4.0, max_seconds=3.0) == 13.0
    assert deadline_s(None, 4.0) is None


@pytest.mark.parametrize("waited_s", [5.0, 5.001, 366 * 86_400.0])
def test_a_request_whose_timeout_has_passed_when_it_comes_is_too_late(waited_s):
    """Nobody waits for it any more."""
    with pytest.raises(DeadlineExceededError, match="the timeout of 5 s passed"):
        deadline_s(5.0, waited_s)


def test_a_claim_ends_where_the_client_says_checked_or_not():
    request = pb.GenerateRequest(prior_output_token_ids=(7, 8), resume_points=(point(2, 3, 55),))
    ends = [(2, hash_by_the_rule(7, 8)), (0, NOTHING), (3, 55), (0, NOTHING)]
    assert [claimed_end(request, index) for index in range(4)] == ends


def body(**fields):
    """Digest and kept part of a request, with all that a client says when it comes first."""
    return body_of(pb.GenerateRequest(request_id="r", tenant="t", text="hi", resumable=True, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"attachment": 2},
        {"resume_from": 3},
        {"resume_hash": 5},
        {"last_attempt": 2},
        {"waited": {"seconds": 1}},
        {"prior_output_token_ids": [1, 2]},
        {"resume_points": [{"index": 1}]},
        {"resume_finished": True},
    ],
)
def test_what_differs_between_attachments_makes_no_other_request_of_it(fields):
    """Nor is it kept: the largest output would not fit."""
    assert body(**fields) == body()


def test_another_trace_makes_no_other_request_of_it_and_is_kept():
    trace = {"trace_parent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "trace_state": "vendor=1"}
    again = trace | {"trace_parent": "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"}

    assert body(**trace)[0] == body(**again)[0] == body()[0]
    kept = pb.GenerateRequest.FromString(body(**trace)[1])
    assert (kept.trace_parent, kept.trace_state) == (trace["trace_parent"], "vendor=1")
    assert body() == body(trace_state="of no trace")


@pytest.mark.parametrize(
    "fields", [{"timeout": {"seconds": 1}}, {"priority": 0}, {"stopping": {"stop": ["x"]}}, {"cache_salt": "s"}]
)
def test_whatever_else_is_sent_makes_another_request(fields):
    """It would be served otherwise."""
    assert body(**fields)[0] != body()[0]
