"""Every field of a request is read, or refused by its name: none is taken and does nothing."""

from dataclasses import replace

import pytest

from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.resumption import check_resumption
from paceline_scheduler.api.text.conversations import template_input
from paceline_scheduler.api.text.output_forms import binds_calls
from paceline_scheduler.api.validation import num_completions, text_options, validate
from paceline_scheduler.errors import InvalidRequestError, RequestRefusedError, SchedulerError, UnsupportedError
from repository_checks.messages import leaves, with_leaf

MODEL = served_model(tokenizer_source(byte_level_tokenizer(), eos_token="<|im_start|>"))
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], tools=[pb.Tool(name="clock")])
# What is set here has another value where a test sets it again.
TEXT_REQUEST = pb.GenerateRequest(
    request_id="r1",
    text="hi",
    sampling={"n": 3},
    output={"skip_special_tokens": False},
    resume_points=[{"index": 1, "resume_from": 1, "prior_output_token_ids": [1]}],
    trace_parent="00",
)
CHAT_REQUEST = pb.GenerateRequest(request_id="r1", chat=CHAT)
# With none, calls in an output are text; a field that is true has its default.
PATHS = set(leaves(pb.GenerateRequest.DESCRIPTOR)) - {"chat.tool_choice.mode", "chat.tool_choice.parallel_calls"}
# By the path of the field: what asks for it, and what is to be found in the error.
REFUSED = {
    "adapter": {"adapter": "legal"},
}


def check(message):
    """Read and validate a request."""
    return validate(message, (MODEL,), 0.0, None, EdgeLimits())[0]


def comeback(message):
    """What its client says that it holds."""
    return check_resumption(message, num_completions(message), MODEL.max_model_len, MODEL.vocab_size)


def refused_field(message):
    """The name of the field that is refused as not supported, without places in lists; None if none is."""
    try:
        check(message)
    except UnsupportedError as error:
        return error.feature.replace("[0]", "")
    except RequestRefusedError:
        pass
    return None


def what_comes_of(message):
    """What the edge makes of a request, or finds wrong with it; and of its prompt, which becomes tokens elsewhere."""
    prompt = message.text, list(message.token_ids.ids), binds_calls(message.chat)
    try:
        valid, conversation = check(message), repr(template_input(message.chat, None))
        asked = repr(replace(valid, origin=b"", body_digest=b"")), repr(text_options(message)), repr(comeback(message))
    except SchedulerError as error:
        return prompt, repr(error)
    kept = pb.GenerateRequest.FromString(valid.origin)
    return prompt, conversation, kept.trace_parent, kept.trace_state, *asked


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_field_of_a_request_is_read_or_refused_by_name(path):
    request = CHAT_REQUEST if path.startswith("chat.") else TEXT_REQUEST
    asking = with_leaf(request, path)
    is_refused = any(path == field or path.startswith(f"{field}.") for field in REFUSED)
    if is_refused:
        assert f"{path}.".startswith(f"{refused_field(asking)}.")
    else:
        assert what_comes_of(asking) != what_comes_of(request)
        assert refused_field(asking) is None


@pytest.mark.parametrize("field", REFUSED)
def test_what_a_later_version_acts_on_is_refused_by_name(field):
    message = pb.GenerateRequest(request_id="r1", text="hi", **REFUSED[field])
    with pytest.raises(UnsupportedError, match="is not supported by this version; leave it unset") as caught:
        check(message)
    assert caught.value.feature == field


@pytest.mark.parametrize("choice", [pb.TOOL_CHOICE_MODE_AUTO, pb.TOOL_CHOICE_MODE_NONE])
def test_what_asks_for_nothing_else_than_what_happens_anyway_is_taken(choice):
    check(
        pb.GenerateRequest(
            request_id="r1",
            chat=pb.Chat(
                messages=[pb.ChatMessage(role="user", name="", reasoning="")],
                tools=[pb.Tool(name="clock", strict=False)],
                tool_choice=pb.ToolChoice(mode=choice, parallel_calls=True),
                continue_final_message=False,
            ),
            adapter="",
            output=sampling_pb2.OutputOptions(parts=False, token_bytes=False),
        )
    )


@pytest.mark.parametrize(("field", "at_most"), [("trace_parent", 128), ("trace_state", 512)])
def test_a_trace_context_is_bounded(field, at_most):
    check(pb.GenerateRequest(request_id="r1", text="hi", **{field: "x" * at_most}))
    with pytest.raises(InvalidRequestError) as caught:
        check(pb.GenerateRequest(request_id="r1", text="hi", **{field: "x" * (at_most + 1)}))
    assert caught.value.field == field
