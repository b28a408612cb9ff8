"""`/v1/chat/completions` and `/v1/completions`: requests begun, read, and told as a whole or as events."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from paceline_client import AsyncClient, AsyncStream, Delta, NotFoundError, Result
from paceline_gateway.asked import Asked, Prompt, asked_of_chat, asked_of_completion
from paceline_gateway.bodies import ChatBody, CompletionBody, GenerationBody, ResponsesBody, read_body
from paceline_gateway.chat import ChatAnswer
from paceline_gateway.clients import Clients
from paceline_gateway.completions import CompletionAnswer, Echo, echo_of, prompts_of
from paceline_gateway.conversation import turns
from paceline_gateway.errors import refused
from paceline_gateway.exchange import Exchange
from paceline_gateway.responses import ResponseAnswer, chat_of, prompt_of


class AnswerWriter(Protocol):
    """How outputs are told, by the number of their request."""

    def chunks(self, number: int, delta: Delta, /) -> bytes:
        """What a delta adds, as events."""

    def end(self, results: Sequence[Result]) -> bytes:
        """The last events."""

    def whole(self, results: Sequence[Result]) -> bytes:
        """All of it, as JSON."""


class Generation:
    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def chat(self, exchange: Exchange) -> None:
        body, exchange.ignored = read_body(ChatBody, await exchange.body())
        prompt = turns(body.messages)
        async with self._client(exchange) as client:
            asked = asked_of_chat(body, *await _model(client, body))
            request_id = exchange.key or f"chatcmpl-{uuid.uuid4().hex}"
            answer = ChatAnswer(
                request_id,
                asked.model,
                int(time.time()),
                has_logprobs=asked.output.logprobs is not None,
                has_token_ids=bool(body.return_token_ids),
                has_usage=_has_usage(body),
                has_parts=asked.has_parts,
                is_call_named=asked.tool_choice is not None and asked.tool_choice.name is not None,
            )
            await _tell(exchange, body, _begun(client, exchange, asked, [prompt], request_id), answer)

    async def completion(self, exchange: Exchange) -> None:
        body, exchange.ignored = read_body(CompletionBody, await exchange.body())
        prompts = prompts_of(body)
        async with self._client(exchange) as client:
            asked = asked_of_completion(body, body.model or (await client.get_model()).name)
            has_logprobs = asked.output.logprobs is not None
            echoes = [Echo()] * len(prompts)
            if body.echo:
                several = (echo_of(client, prompt, asked.model, has_logprobs=has_logprobs) for prompt in prompts)
                echoes = await asyncio.gather(*several)
            request_id = exchange.key or f"cmpl-{uuid.uuid4().hex}"
            answer = CompletionAnswer(
                request_id,
                asked.model,
                int(time.time()),
                echoes,
                asked.sampling.n or 1,
                has_logprobs=has_logprobs,
                has_token_ids=bool(body.return_token_ids),
                has_usage=_has_usage(body),
                is_echo_alone=bool(body.echo and body.max_tokens == 0),
            )
            await _tell(exchange, body, _begun(client, exchange, asked, prompts, request_id), answer)

    async def response(self, exchange: Exchange) -> None:
        body, exchange.ignored = read_body(ResponsesBody, await exchange.body())
        prompt, chat = prompt_of(body), chat_of(body)
        async with self._client(exchange) as client:
            asked = asked_of_chat(chat, *await _model(client, chat))
            request_id = exchange.key or f"resp_{uuid.uuid4().hex}"
            answer = ResponseAnswer(request_id, body, asked.model, int(time.time()), has_parts=asked.has_parts)
            await _tell(exchange, chat, _begun(client, exchange, asked, [prompt], request_id), answer)

    def _client(self, exchange: Exchange) -> contextlib.AbstractAsyncContextManager[AsyncClient]:
        return (self._clients.of if exchange.key is None else self._clients.alone)(exchange.bearer)


async def _model(client: AsyncClient, body: ChatBody) -> tuple[str, bool]:
    """Its name, which is in every answer, and whether its outputs may have reasoning."""
    if body.model and body.tools:
        return body.model, True  # the output comes cut anyway
    try:
        model = await client.get_model(body.model)
    except NotFoundError:
        if not body.model:
            raise
        return body.model, True  # its executors may come yet, for which the request waits
    return model.name, model.supports_reasoning


def _has_usage(body: GenerationBody) -> bool:
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "is for stream: true alone")
    return options is not None and bool(options.include_usage)


def _begun(
    client: AsyncClient, exchange: Exchange, asked: Asked, prompts: Sequence[Prompt], request_id: str
) -> list[AsyncStream]:
    """One request for each prompt."""
    idempotent, trace = exchange.key is not None, exchange.trace
    ids = [request_id, *(f"{request_id}.{number}" for number in range(1, len(prompts)))]
    return [
        asked.begin(client, prompt, each, trace, idempotent=idempotent)
        for prompt, each in zip(prompts, ids, strict=True)
    ]


async def _tell(exchange: Exchange, body: GenerationBody, streams: Sequence[AsyncStream], answer: AnswerWriter) -> None:
    is_stream = bool(body.stream)
    async with exchange.attended(*streams, is_stream=is_stream):
        if is_stream:
            await _each([_events(exchange, number, stream, answer) for number, stream in enumerate(streams)])
            await exchange.end(answer.end([stream.result for stream in streams]))
        else:
            await exchange.answer(answer.whole(await _each([stream.collect() for stream in streams])))


async def _events(exchange: Exchange, number: int, stream: AsyncStream, answer: AnswerWriter) -> None:
    async for delta in stream:
        if chunks := answer.chunks(number, delta):
            await exchange.write(chunks)


ValueT = TypeVar("ValueT")


async def _each(works: Sequence[Coroutine[Any, Any, ValueT]]) -> list[ValueT]:
    """What all of these return; the first that fails ends the others."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
