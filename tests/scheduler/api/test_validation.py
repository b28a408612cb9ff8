"""Validation: every field in its range, an error that names it otherwise, and unset is not zero."""

import math
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration

from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.values import RecordId
from paceline.v1 import inference_pb2 as pb
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.resumption import body_of, check_resumption
from paceline_scheduler.api.text.stop_texts import MatchedText
from paceline_scheduler.api.validation import (
    MAX_ORIGIN_BYTES,
    TextOptions,
    check_prompt_logprobs,
    derived_seed,
    text_options,
    validate,
)
from paceline_scheduler.errors import InvalidRequestError, NoExecutorError, UnknownModelError

SOURCE = tokenizer_source(byte_level_tokenizer(), eos_token="<|im_end|>")
MODEL = served_model(SOURCE)
END = SOURCE.end_token_ids[0]


def request_with(path="", value=None):
    """A request for "hello" with one field set, by its path."""
    group, _, name = path.rpartition(".")
    request = pb.GenerateRequest(request_id="r1", text="hello")
    if path:
        request.ClearField(path.partition(".")[0])
        request.MergeFrom(pb.GenerateRequest(**{group: {name: value}} if group else {name: value}))
    return request


def seconds(value):
    """A duration, also one that no server takes."""
    whole, part = divmod(value, 1)
    return Duration(seconds=int(whole), nanos=round(part * 1e9))


def chat(*turns):
    """A chat by who speaks and what is said."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def check(request, models=(MODEL,), now_s=0.0, max_seconds=None):
    """Validate with the usual limits, also what a client says that comes back."""
    valid, _ = validate(request, models, now_s, max_seconds, EdgeLimits())
    check_resumption(request, valid.num_completions, models[0].max_model_len, models[0].vocab_size)
    return valid


def refused_field(request):
    """The field that a request is refused for, in a sentence."""
    with pytest.raises(InvalidRequestError) as caught:
        check(request)
    assert caught.value.message
    return caught.value.field


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[("sampling.temperature", value) for value in (-0.1, 100.1, math.nan, math.inf, -math.inf, -0.0001)],
        *[("sampling.top_k", value) for value in (0, -1, -(2**31), 401, 2**31 - 1)],
        *[("sampling.top_p", value) for value in (0.0, -1.0, 1.001, math.nan, math.inf)],
        *[("sampling.min_p", value) for value in (-0.001, 1.001, math.nan, -math.inf)],
        *[("stopping.max_tokens", value) for value in (0, -1, -(2**31))],
        *[("output.logprobs", value) for value in (-1, 21, 2**31 - 1)],
        *[("output.prompt_logprobs", value) for value in (-1, 21, -(2**31), 2**31 - 1)],
        *[("stopping.min_tokens", value) for value in (-1, -(2**31))],
        *[
            (f"sampling.{name}_penalty", value)
            for name in ("presence", "frequency")
            for value in (-2.001, 2.001, math.nan, math.inf, -math.inf)
        ],
        *[("sampling.repetition_penalty", value) for value in (0.0, -1.0, 10.001, math.nan, math.inf)],
        ("sampling.logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("sampling.logit_bias", {400: 0.0}),
        ("sampling.logit_bias", {-1: 0.0}),
        ("sampling.allowed_token_ids", [1] * 4097),
        ("sampling.bad_words", ["x"] * 257),
        *[("output.stream_interval", value) for value in (0, -1, -(2**31))],
        *[("sampling.n", value) for value in (0, -1, 17, 2**31 - 1)],
        *[("priority", value) for value in (-101, 101, -(2**31), 2**31 - 1)],
        *[("timeout", seconds(value)) for value in (0.0, -1.0, 366 * 86_400.5, 2**31, 2**62)],
        *[("waited", seconds(value)) for value in (-0.001, 366 * 86_400.5, 2**62)],
        *[("resume_from", value) for value in (257, 2**31, 2**32 - 1)],
        *[("last_attempt", value) for value in (2**30 + 1, 2**31, 2**32 - 1)],
        ("prior_output_token_ids", (1,) * 257),
        ("resume_points", ({},)),
        *[(name, "é" * 65) for name in ("request_id", "tenant", "cache_salt")],
        ("model", "m" * 257),
        ("request_id", ""),
        ("stopping.stop", ["x"] * 17),
        ("stopping.stop_token_ids", [1] * 65),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(path, value):
    assert refused_field(request_with(path, value)) == path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[("sampling.temperature", value) for value in (0.0, 100.0)],
        *[("sampling.top_k", value) for value in (1, 400)],
        *[("sampling.top_p", value) for value in (1e-9, 1.0)],
        *[("sampling.min_p", value) for value in (0.0, 1.0)],
        *[("sampling.seed", value) for value in (0, 2**64 - 1)],
        *[("stopping.max_tokens", value) for value in (1, 2**31 - 1)],
        *[("output.logprobs", value) for value in (0, 20)],
        *[("output.prompt_logprobs", value) for value in (0, 20)],
        *[("stopping.min_tokens", value) for value in (0, 2**31 - 1)],
        *[(f"sampling.{name}_penalty", value) for name in ("presence", "frequency") for value in (-2.0, 0.0, 2.0)],
        *[("sampling.repetition_penalty", value) for value in (1e-9, 1.0, 10.0)],
        ("sampling.logit_bias", {0: -100.0, 399: 100.0}),
        ("sampling.allowed_token_ids", [0, 399] * 2048),
        ("sampling.bad_words", ["x" * 64] * 256),
        *[("output.stream_interval", value) for value in (1, 2**31 - 1)],
        *[("sampling.n", value) for value in (1, 16)],
        *[("priority", value) for value in (-100, 0, 100)],
        *[("timeout", seconds(value)) for value in (1e-9, 366 * 86_400.0)],
        *[("waited", seconds(value)) for value in (0.0, 366 * 86_400.0)],
        *[("last_attempt", value) for value in (0, 2**30)],
        *[("attachment", value) for value in (0, 1, 2**32 - 1)],
        ("resume_from", 0),
        ("prior_output_token_ids", (1,) * 256),
        *[(name, "é" * 64) for name in ("request_id", "tenant", "cache_salt")],
        ("stopping.stop", ["x" * 256] * 16),
        ("stopping.stop_token_ids", [399] * 64),
    ],
)
def test_the_ends_of_every_range_are_taken(path, value):
    check(request_with(path, value))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("stopping.stop", ["a", ""], "stopping.stop[1]"),
        ("stopping.stop", ["a" * 257], "stopping.stop[0]"),
        ("stopping.stop_token_ids", [0, 400], "stopping.stop_token_ids[1]"),
        ("stopping.stop_token_ids", [-1], "stopping.stop_token_ids[0]"),
        ("sampling.allowed_token_ids", [0, 400], "sampling.allowed_token_ids[1]"),
        ("sampling.allowed_token_ids", [-1], "sampling.allowed_token_ids[0]"),
        *[("sampling.logit_bias", {7: bias}, "sampling.logit_bias[7]") for bias in (100.1, -100.1, math.nan, math.inf)],
        ("sampling.bad_words", ["a", ""], "sampling.bad_words[1]"),
        ("sampling.bad_words", ["a" * 65], "sampling.bad_words[0]"),
        ("text", None, "prompt"),
        ("text", "", "text"),
        ("text", "x" * (256 * 16 + 1), "text"),
        ("token_ids", {}, "token_ids"),
        ("token_ids", {"ids": [1] * 256}, "prompt"),
        ("chat", chat(), "chat.messages"),
        ("chat", chat(*[("user", "x")] * 4097), "chat.messages"),
        ("chat", chat(("user", "x"), ("", "x")), "chat.messages[1].role"),
        ("chat", chat(("user", "x" * 256 * 16)), "chat"),
    ],
)
def test_a_wrong_part_of_a_list_or_prompt_is_named_by_its_place(path, value, field):
    assert refused_field(request_with(path, value)) == field


def test_a_prompt_that_is_too_long_names_both_numbers():
    with pytest.raises(InvalidRequestError, match="has 256 tokens; at most 255 fit"):
        check(request_with("token_ids", {"ids": [1] * 256}))
    check(request_with("token_ids", {"ids": [1] * 255}))


def test_what_is_kept_of_a_request_is_bounded():
    rest = MAX_ORIGIN_BYTES - len(body_of(request_with("stopping.stop", ["x" * 2**17]))[1]) + 2**17
    assert refused_field(request_with("stopping.stop", ["x" * rest])) == "stopping.stop[0]"
    with pytest.raises(InvalidRequestError, match=f"has {MAX_ORIGIN_BYTES + 1} bytes beside its prompt") as caught:
        check(request_with("stopping.stop", ["x" * (rest + 1)]))
    assert caught.value.field == "message"


def test_a_structured_output_ends_where_its_form_is_complete():
    request = request_with("structured", {"regex": "a"})
    assert check(request).structured == request.structured.SerializeToString()
    request.structured.choice.SetInParent()
    request.stopping.ignore_eos = True
    with pytest.raises(InvalidRequestError, match="ends where the form is complete") as caught:
        check(request)
    assert caught.value.field == "stopping.ignore_eos"


def test_a_chat_needs_a_template():
    """The error says what to send instead."""
    model = served_model(tokenizer_source(byte_level_tokenizer(), chat_template=None))
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        check(request_with("chat", chat(("user", "x"))), models=(model,))
    assert caught.value.field == "chat"


def test_unset_fields_take_the_defaults():
    valid = check(request_with())
    sampling = valid.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (valid.max_tokens, valid.num_logprobs, valid.deadline_s, valid.bad_words) == (None, None, None, ())
    assert (valid.end_token_ids, valid.model) == ((END,), MODEL.name)
    assert text_options(request_with()) == TextOptions((), (), True, MatchedText.DROPPED, 1, False, False)


def test_unset_fields_take_the_models_generation_defaults_and_zero_is_not_unset():
    """A temperature of 0 is greedy even where the model would like 0.6."""
    defaults = GenerationDefaults(temperature=0.6, top_k=40, top_p=0.9, min_p=0.1)
    model = served_model(replace(SOURCE, defaults=defaults))
    unset = check(request_with(), models=(model,)).sampling
    assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p) == (0.6, 40, 0.9, 0.1)
    sent = check(
        request_with("sampling", {"temperature": 0.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}), models=(model,)
    ).sampling
    assert (sent.temperature, sent.top_k, sent.top_p, sent.min_p) == (0.0, 3, 1.0, 0.0)


def test_a_models_repetition_penalty_counts_unless_the_request_says_otherwise():
    """1, which changes nothing, is not unset."""
    model = served_model(replace(SOURCE, defaults=GenerationDefaults(repetition_penalty=1.1)))
    assert check(request_with(), models=(model,)).sampling.repetition_penalty == 1.1
    assert check(request_with("sampling.repetition_penalty", 1.0), models=(model,)).sampling.repetition_penalty == 1.0
    assert check(request_with()).sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(("top_k", "expected"), [(0, 0), (1000, 400)])
def test_a_models_default_top_k_may_mean_unlimited_or_more_than_there_is(top_k, expected):
    model = served_model(replace(SOURCE, defaults=GenerationDefaults(top_k=top_k)))
    assert check(request_with(), models=(model,)).sampling.top_k == expected


def test_logprobs_of_zero_are_not_unset():
    assert check(request_with("output.logprobs", 0)).num_logprobs == 0
    assert check(request_with("output.prompt_logprobs", 0)).num_prompt_logprobs == 0
    assert check(request_with()).num_prompt_logprobs is None


def test_prompt_logprobs_fit_into_one_answer():
    check_prompt_logprobs(None, 2**31)
    check_prompt_logprobs(0, 16_384)
    check_prompt_logprobs(20, 780)
    with pytest.raises(InvalidRequestError, match="16401 values for 781 prompt tokens") as caught:
        check_prompt_logprobs(20, 781)
    assert caught.value.field == "output.prompt_logprobs"


def test_penalties_and_lists_arrive_as_sent_and_unset_ones_change_nothing():
    """A penalty of 0 is one; an allowed token named twice is allowed once."""
    numbers = {"presence_penalty": -0.5, "frequency_penalty": 0.0, "repetition_penalty": 1.25}
    lists = {"logit_bias": {7: 1.5, 3: -2.0}, "allowed_token_ids": [9, 7, 9], "bad_words": ["no"]}
    sent = request_with("sampling", numbers | lists)
    sampling = check(sent).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 0.0, 1.25)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == (((3, -2.0), (7, 1.5)), (9, 7))
    assert text_options(sent).bad_words == ("no",)
    unset = check(request_with()).sampling
    assert (unset.presence_penalty, unset.frequency_penalty, unset.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (unset.logit_bias, unset.allowed_token_ids) == ((), ())


def test_a_minimum_beyond_the_maximum_is_refused():
    """It would never be reached; the same number is fine."""
    assert check(request_with("stopping", {"max_tokens": 5, "min_tokens": 5})).min_tokens == 5
    with pytest.raises(InvalidRequestError, match="is 6, must be at most max_tokens, which is 5") as caught:
        check(request_with("stopping", {"max_tokens": 5, "min_tokens": 6}))
    assert caught.value.field == "stopping.min_tokens"


def test_end_tokens_that_the_model_cannot_draw_are_left_out():
    """A tokenizer may know more tokens than the model has logits for; no request fails because of that."""
    source = replace(SOURCE, end_token_ids=(END, MODEL.vocab_size, MODEL.vocab_size + 7))
    assert check(request_with(), models=(served_model(source),)).end_token_ids == (END,)


def test_end_tokens_are_the_models_and_the_requests():
    own = [7, END, 7]
    assert check(request_with("stopping.stop_token_ids", own)).end_token_ids == (END, 7)
    stopping = {"stop_token_ids": own, "ignore_eos": True}
    assert check(request_with("stopping", stopping)).end_token_ids == (7, END)
    assert check(request_with("stopping.ignore_eos", True)).end_token_ids == ()
    assert check(request_with("stopping.ignore_eos", True)).ignored_end_token_ids == (END,)
    assert check(request_with()).ignored_end_token_ids == ()


@pytest.mark.parametrize(
    ("timeout_s", "max_seconds", "deadline_s"),
    [
        *((None, None, None), (5.0, None, 15.0), (None, 3.0, 13.0), (5.0, 3.0, 13.0), (2.0, 3.0, 12.0)),
        (None, 1e30, 10.0 + 366 * 86_400),
    ],
)
def test_the_earlier_of_timeout_and_the_calls_deadline_holds(timeout_s, max_seconds, deadline_s):
    timeout = None if timeout_s is None else seconds(timeout_s)
    request = request_with("timeout", timeout)
    assert check(request, now_s=10.0, max_seconds=max_seconds).deadline_s == deadline_s


def test_an_unset_seed_follows_from_tenant_and_request():
    """The same when it is sent again, another for every other request; never by gluing the names together."""
    keys = [RecordId("t", "r"), RecordId("", "tr"), RecordId("tr", ""), RecordId("t", "r2")]
    seeds = [derived_seed(key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert check(pb.GenerateRequest(tenant="t", request_id="r", text="hello")).sampling.seed == seeds[0]
    assert check(request_with("sampling.seed", 0)).sampling.seed == 0


def test_the_derived_seed_never_changes():
    assert derived_seed(RecordId("tenant", "request-1")) == 0x3939EDA62AEC8930


def test_the_only_model_needs_no_name():
    other = served_model(SOURCE, name="other")
    assert check(request_with()).model == MODEL.name
    assert check(request_with("model", "other"), models=(MODEL, other)).model == "other"
    with pytest.raises(InvalidRequestError, match="'tiny', 'other'") as caught:
        check(request_with(), models=(MODEL, other))
    assert caught.value.field == "model"
    with pytest.raises(UnknownModelError, match="'missing'"):
        check(request_with("model", "missing"))


def test_without_executors_the_client_is_told_to_come_back():
    with pytest.raises(NoExecutorError) as caught:
        check(request_with(), models=())
    assert caught.value.retry_after_s > 0
