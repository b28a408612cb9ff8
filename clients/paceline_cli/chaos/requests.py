"""What the load asks: a fixed set of requests, as different as the API lets them be, each with a repeatable output.

Knows requests only. Each is greedy or has a seed, so that its output is the same whenever and beside whatever it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_client.async_client import AsyncClient, AsyncStream
from paceline_client.forms import Form, JsonSchema, Regex, Tag, Tags
from paceline_client.requests import Message, Output, Sampling, Stopping
from paceline_client.tools import Tool, ToolChoice

_GREEDY = Sampling(temperature=0.0, seed=20)  # which a simulated runner goes by
_PLAIN = Output()
_SUBJECTS = ("a lighthouse", "two rivers", "the night train", "an old piano", "the first snow", "a paper boat")
_RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer"},
        "name": {"type": "string", "maxLength": 24},
        "state": {"enum": ["open", "closed", "waiting"]},
    },
    "required": ["identifier", "name", "state"],
    "additionalProperties": False,
}
_RECORDS = {"type": "array", "items": _RECORD, "minItems": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One request of the set. Exactly one of `prompt` and `messages` is set."""

    name: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    sampling: Sampling = _GREEDY
    stopping: Stopping
    output: Output = _PLAIN
    structured: Form | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None

    def stream(self, client: AsyncClient, model: str) -> AsyncStream:
        """The request, not yet sent: it goes out when its first delta is asked for."""
        return client.stream(
            self.prompt,
            messages=self.messages,
            sampling=self.sampling,
            stopping=self.stopping,
            output=self.output,
            structured=self.structured,
            tools=self.tools,
            tool_choice=self.tool_choice,
            model=model,
        )


def chaos_requests(max_tokens: int, *, has_forms: bool, has_tools: bool) -> tuple[ChaosRequest, ...]:
    """24 requests with outputs of a half to all of `max_tokens`: half of them greedy, half sampled with a seed. Where
    the model has forms, four more that keep to one; where its calls can be held to one, four more that call tools.
    """
    lengths = (max_tokens, max_tokens * 3 // 4, max_tokens // 2, max_tokens * 5 // 8)
    plain = [
        ChaosRequest(
            name=f"story {number}",
            prompt=f"Once upon a time there was {_SUBJECTS[number % 6]}. " * (1 + 3 * (number % 3)),
            sampling=Sampling(temperature=0.8, seed=number) if number % 2 else _GREEDY,
            stopping=Stopping(max_tokens=max(lengths[number % 4], 1), ignore_eos=True),
        )
        for number in range(12)
    ]
    special = _special(max_tokens) | (_formed(max_tokens) if has_forms else {})
    special |= _called(max_tokens) if has_tools else {}
    return (*plain, *(replace(request, name=name) for name, request in special.items()))


def _special(max_tokens: int) -> dict[str, ChaosRequest]:
    """Requests that carry more state than their tokens: counts, alternatives, texts held back, several outputs."""
    whole = Stopping(max_tokens=max_tokens, ignore_eos=True)
    half = Stopping(max_tokens=max(max_tokens // 2, 1), ignore_eos=True)

    def ask(subject: str, sampling: Sampling, stopping: Stopping, output: Output = _PLAIN) -> ChaosRequest:
        return ChaosRequest(
            name="", prompt=f"Tell me of {subject}.", sampling=sampling, stopping=stopping, output=output
        )

    def until(texts: Sequence[str], *, is_shown: bool) -> Stopping:
        return replace(whole, stop=texts, min_tokens=max_tokens // 4, include_stop_str_in_output=is_shown)

    return {
        "two completions": ask("a lake", Sampling(temperature=0.9, seed=21, n=2), half),
        "three completions": ask("a hill", Sampling(temperature=1.2, top_k=50, seed=22, n=3), half),
        "log-probabilities": ask("a bell", _GREEDY, whole, Output(logprobs=2)),
        "prompt's log-probabilities": ask("a mill", Sampling(seed=23), half, Output(logprobs=0, prompt_logprobs=1)),
        "stop texts": ask("a wolf", _GREEDY, until((" and the", ", and", ".\n"), is_shown=False)),
        "stop text shown": ask("a king", Sampling(temperature=0.7, seed=24), until((", ", ". "), is_shown=True)),
        "penalties": ask("a road", replace(_GREEDY, frequency_penalty=0.6, presence_penalty=0.4), whole),
        "repetition penalty": ask("a song", Sampling(temperature=0.6, repetition_penalty=1.3, seed=25), whole),
        "narrow draw": ask("a door", Sampling(temperature=1.5, top_p=0.7, min_p=0.05, seed=26), whole),
        "words it may not say": ask("a ship", replace(_GREEDY, bad_words=(" ship", " sea")), half),
        "few messages": ask("a star", Sampling(temperature=1.0, seed=27), whole, Output(stream_interval=5)),
        "chat": ChaosRequest(
            name="",
            messages=(Message("system", "You answer in one sentence."), Message("user", "What is a comet?")),
            stopping=whole,
        ),
    }


def _formed(max_tokens: int) -> dict[str, ChaosRequest]:
    """Outputs of forms that go on for longer."""
    whole, half = (Stopping(max_tokens=max(tokens, 1)) for tokens in (max_tokens, max_tokens // 2))
    records, word = JsonSchema(_RECORDS), Regex("[a-z]{3,9}( [a-z]{3,9}){400}")
    tags = Tags([Tag("<note>", JsonSchema(_RECORD, compact=True), "</note>")])

    def ask(sampling: Sampling, stopping: Stopping, structured: Form) -> ChaosRequest:
        return ChaosRequest(
            name="", prompt="The records are ", sampling=sampling, stopping=stopping, structured=structured
        )

    return {
        "records": ask(_GREEDY, whole, records),
        "records, four completions": ask(Sampling(temperature=1.0, seed=28, n=4), half, records),
        "words of letters": ask(Sampling(temperature=0.9, top_k=50, seed=29), whole, word),
        "notes in a text": ask(Sampling(temperature=1.0, seed=30, frequency_penalty=0.5), whole, tags),
    }


def _called(max_tokens: int) -> dict[str, ChaosRequest]:
    """Outputs in parts, with calls of tools that are held to their schemas."""
    tools = tuple(Tool(name, f"Of a {name}", _RECORD, strict=True) for name in ("ferry", "parcel"))

    def ask(sampling: Sampling, choice: ToolChoice, stream_interval: int | None = None) -> ChaosRequest:
        return ChaosRequest(
            name="",
            messages=(Message("user", "Where are they?"),),
            sampling=sampling,
            stopping=Stopping(max_tokens=max_tokens),
            output=Output(parts=True, stream_interval=stream_interval),
            tools=tools,
            tool_choice=choice,
        )

    required = ToolChoice(mode="required")
    return {
        "required call": ask(replace(_GREEDY, bad_words=("<think>",)), required),
        "named call, two completions": ask(Sampling(temperature=1.0, seed=33, n=2), ToolChoice(name="parcel")),
        "calls in a text": ask(Sampling(temperature=1.0, seed=65), ToolChoice(mode="auto"), stream_interval=5),
        "thought, then called": ask(Sampling(temperature=1.0, seed=59), required),
    }
