"""Completions: prompts of every kind, echoes, log-probabilities as evaluation harnesses read them."""

import json

import grpc
import pytest
from openai.types import Completion

from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL, encode
from gateway_rig import events_of, serve_gateway
from paceline_client import Delta, TokenLogprob, TokenLogprobs
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens, echo, say
from paceline_gateway.completions import CompletionAnswer, Echo

COMPLETIONS = "/v1/completions"


async def ask(gateway, **body):
    """The choices of a whole answer, and those of the same as a stream, put together."""
    whole = await gateway.post(COMPLETIONS, body)
    answer = Completion.model_validate_json(whole.content, strict=True)
    streamed = await gateway.post(COMPLETIONS, body | {"stream": True})
    *data, last = events_of(streamed.text)
    assert last == "[DONE]"
    texts, reasons = {}, {}
    for chunk in data:
        (choice,) = json.loads(chunk)["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}
    return answer


async def test_choices_are_numbered_over_several_prompts():
    def script(request):
        n = request.sampling.n or 1
        return [step for i in range(n) for step in (Tokens((i,), f"{request.text}{i}", completion=i),
                                                    End(completion=i, num_prompt_tokens=3))]  # fmt: skip

    async with FakeServer(script) as server, serve_gateway(server.target) as gateway:
        answer = await ask(gateway, prompt=["a", "b"], n=2)
        assert [choice.text for choice in answer.choices] == ["a0", "a1", "b0", "b1"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)


async def test_of_several_prompts_the_first_failure_is_the_answer_and_ends_the_others():
    full = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL")

    def script(request):
        return [full] if request.text == "b" else [Hold()]

    async with FakeServer(script) as server, serve_gateway(server.target) as gateway:
        for stream in (False, True):
            refused = await gateway.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        await server.seen_that(lambda seen: len(seen.cancelled) == 2)


async def test_prompts_may_be_token_ids():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        await ask(gateway, prompt=[5, 6])
        assert list(server.seen.requests[-1].token_ids.ids) == [5, 6]
        answer = await ask(gateway, prompt=[[5], [6]])
        assert len(answer.choices) == 2


async def test_an_echo_stands_before_the_output_whatever_the_prompt_was():
    async with FakeServer(echo) as server, serve_gateway(server.target) as gateway:
        assert (await ask(gateway, prompt="say ", echo=True)).choices[0].text == "say say "
    async with FakeServer(say("!")) as server, serve_gateway(server.target) as gateway:
        assert (await ask(gateway, prompt=[97, 98], echo=True)).choices[0].text == "ab!"


async def test_an_echo_alone_leaves_the_output_out():
    async with FakeServer(say("!")) as server, serve_gateway(server.target) as gateway:
        assert (await ask(gateway, prompt=[97], echo=True, max_tokens=0)).choices[0].text == "a"
        assert server.seen.requests[-1].stopping.max_tokens == 1


PROMPT = (
    TokenLogprobs(11, -1.5, (TokenLogprob(12, -0.5, b"y"),), b"x"),
    TokenLogprobs(13, -2.0, (TokenLogprob(13, -2.0, b"\xe2\x82"), TokenLogprob(14, -3.0, b"\xe2\x82")), b"\xe2\x82"),
)
OUTPUT = (TokenLogprobs(15, -0.25, (), b"\xac!"),)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_log_probabilities_go_over_echo_and_output(in_pieces):
    """As lm-eval reads them: nothing for the first token, the greedy one in every dict, offsets into the whole text."""
    answer = CompletionAnswer("id", "m", 0, [Echo("<s>x€", "<s>")], 1, has_logprobs=True, has_token_ids=False,
                              has_usage=False, is_echo_alone=False)  # fmt: skip
    deltas = [Delta("!", (15,), 0, 1, OUTPUT, prompt_logprobs=PROMPT)]
    if in_pieces:
        deltas = [Delta("", (), 0, 1, prompt_logprobs=PROMPT), Delta("!", (15,), 0, 1, OUTPUT)]
    read = [json.loads(answer.chunks(0, delta)[6:])["choices"][0] for delta in deltas]
    told = {name: [value for choice in read for value in choice["logprobs"][name]] for name in read[0]["logprobs"]}
    assert "".join(choice["text"] for choice in read) == "<s>x€!"
    assert told == {
        "tokens": ["<s>", "x", "\ufffd", "\ufffd!"],
        "token_logprobs": [None, -1.5, -2.0, -0.25],
        "top_logprobs": [None, {"y": -0.5, "x": -1.5}, {"\ufffd": -2.0, "token_id:14": -3.0}, {"\ufffd!": -0.25}],
        "text_offset": [0, 3, 4, 4],
    }


async def test_tokens_are_told_as_vllm_does():
    async with serve_edge(ScriptedBackend(MODEL)) as edge, serve_gateway(edge.address) as gateway:
        told = (await gateway.post("/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
        assert told == {
            "count": len(encode("hello")), "max_model_len": 256, "tokens": encode("hello"),
            "token_strs": told["token_strs"],
        }  # fmt: skip
        assert "".join(told["token_strs"]) == "hello"
        bare = (await gateway.post("/tokenize", {"prompt": "hello", "add_special_tokens": False})).json()
        assert bare["tokens"] == encode("hello")
        chat = (await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
        assert chat["count"] > 3
        back = await gateway.post("/detokenize", {"tokens": told["tokens"]})
        assert back.json() == {"prompt": "hello"}
        wrong = await gateway.post("/detokenize", {"tokens": [10**6]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
