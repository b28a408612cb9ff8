"""Any server with OpenAI's `/v1/completions`: prompts are text, answers come as server-sent events.

Knows HTTP and that API's fields. An endpoint that sends no usage is taken at its messages: one token each.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import httpx2

from paceline_cli.bench.errors import EndpointError, NoOutputError
from paceline_cli.bench.records import Counted
from paceline_cli.bench.targets import Outgoing, Served
from paceline_client.errors import (
    AccessDeniedError,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PacelineError,
    RequestTimeoutError,
    ServerError,
    StreamCorruptedError,
    UnavailableError,
)
from paceline_client.requests import Sampling

# Nearly every vocabulary has each of these as one token behind a space.
_TEXT = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our man me
even most made after also did many off before must well back through years where much your way down should because
long each just state those people too little good world still see own men work here life both get under never day
same another know while last might great old year come since against right three
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())

_Default = TypeVar("_Default", int, None)
_CONNECT_SECONDS = 5.0
_ERROR_OF_STATUS: dict[int, type[PacelineError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: NotFoundError,
    408: RequestTimeoutError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: RequestTimeoutError,
}


class OpenAITarget:
    """Sends over a connection per running request. Make it with `connect`."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        served: Served,
        sampling: Sampling,
        *,
        ignore_eos: bool,
        now: Callable[[], float],
    ) -> None:
        self._http = http
        self._served = served
        self._now = now
        # Without those that are not set: servers refuse fields that they do not know, or null in them.
        self._common = {
            "model": served.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if sampling.temperature is None else {"temperature": sampling.temperature}),
            **({"ignore_eos": True} if ignore_eos else {}),
        }

    @classmethod
    async def connect(
        cls,
        base_url: str,
        model: str | None,
        sampling: Sampling,
        *,
        api_key: str | None,
        ignore_eos: bool,
        now: Callable[[], float],
    ) -> Self:
        """Ask for the models, and take the first where none is named. `EndpointError` where nothing answers."""
        try:
            http = httpx2.AsyncClient(
                base_url=base_url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                # A proxy from the environment would be measured too.
                trust_env=False,
            )
        except httpx2.InvalidURL as error:
            raise EndpointError(f"--base-url: {base_url!r} is no address: {error}") from None
        try:
            served = await model_of(http, base_url, model)
        except BaseException:
            await http.aclose()
            raise
        return cls(http, served, sampling, ignore_eos=ignore_eos, now=now)

    @property
    def served(self) -> Served:
        return self._served

    @property
    def num_symbols(self) -> int:
        """Words that prompts are made of."""
        return len(WORDS)

    async def send(self, request: Outgoing, times: list[float]) -> Counted:
        prompt = " ".join(WORDS[symbol] for symbol in request.symbols)
        body = {**self._common, "prompt": prompt, "max_tokens": request.num_output_tokens}
        usage: dict[str, Any] = {}
        with _as_client_errors():
            async with self._http.sse("completions", method="POST", json=body) as events:
                if events.response.is_error:
                    await events.response.aread()
                    raise error_of_response(events.response)
                # Read to the end of the body, past [DONE]: else the connection could not be used again.
                async for event in events:
                    if event.data != "[DONE]":
                        usage = self._read(event.data, times) or usage
        if not times:
            raise NoOutputError("the answer ended without a token")
        details = usage.get("prompt_tokens_details")
        return Counted(
            _number(usage, "prompt_tokens", len(request.symbols)),
            _number(usage, "completion_tokens", len(times)),
            _number(details, "cached_tokens", None) if isinstance(details, dict) else None,
        )

    def _read(self, data: str, times: list[float]) -> dict[str, Any] | None:
        """Note the time of a message with tokens; return what a message says of usage."""
        moment = self._now()
        message = json.loads(data)
        if not isinstance(message, dict):
            raise StreamCorruptedError(f"a message is not what OpenAI's API sends: {data}")
        if message.get("choices"):
            times.append(moment)
        elif error := message.get("error"):
            raise ServerError(f"the stream ended with an error: {_message_of(error)}")
        usage = message.get("usage")
        return usage if isinstance(usage, dict) else None

    async def close(self) -> None:
        await self._http.aclose()


async def model_of(http: httpx2.AsyncClient, base_url: str, model: str | None) -> Served:
    """The model of that name, the first one for None; a name alone is enough for a server that lists none."""
    try:
        found = await _found(http, model)
    except NotFoundError as error:
        if model is None:
            raise EndpointError(f"{base_url}/models: {error}. Does --base-url end in /v1?") from None
        return Served(model, None)
    except AccessDeniedError as error:
        raise AccessDeniedError(f"{base_url}: {error}. Set OPENAI_API_KEY to a key that may") from None
    except (EndpointError, ConnectionLostError) as error:
        raise EndpointError(f"no server answers at {base_url}: {error}. Is it running?") from None
    except (AttributeError, LookupError, TypeError, StreamCorruptedError):
        raise EndpointError(f"{base_url}/models does not answer as OpenAI's API does: is it one?") from None
    return Served(str(found["id"]), _number(found, "max_model_len", None))


def _number(fields: dict[str, Any], name: str, default: _Default) -> int | _Default:
    """What is no number was not said."""
    value = fields.get(name)
    return value if type(value) is int and value >= 0 else default


async def _found(http: httpx2.AsyncClient, model: str | None) -> dict[str, Any]:
    with _as_client_errors():
        response = await http.get("models")
        if response.is_error:
            raise error_of_response(response)
        listed: list[dict[str, Any]] = response.json()["data"]
    for item in listed:
        if model in (None, item["id"]):
            return item
    raise NotFoundError(f"no model {model!r} is served, only: {', '.join(item['id'] for item in listed) or 'none'}")


def error_of_response(response: httpx2.Response) -> PacelineError:
    """The body must have been read."""
    try:
        said = _message_of(response.json())
    except (ValueError, RecursionError):
        said = response.text
    kind = _ERROR_OF_STATUS.get(response.status_code, InvalidRequestError if response.is_client_error else ServerError)
    return kind(f"HTTP {response.status_code}: {said or response.reason_phrase}")


def _message_of(value: object) -> str:
    match value:
        case {"error": inner}:
            return _message_of(inner)
        case {"message": str(message)}:
            return message
    return str(value)


@contextmanager
def _as_client_errors() -> Iterator[None]:
    """Turn what HTTP and JSON raise into the client's errors, so that failures have the same kinds everywhere."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
        raise EndpointError(_text_of(error)) from None
    except httpx2.TimeoutException as error:
        raise RequestTimeoutError(_text_of(error)) from None
    except httpx2.SSEError as error:
        raise StreamCorruptedError(_text_of(error)) from None
    except httpx2.TransportError as error:
        raise ConnectionLostError(_text_of(error)) from None
    except (httpx2.DecodingError, ValueError, RecursionError) as error:
        raise StreamCorruptedError(f"a message is not what OpenAI's API sends: {error}") from None


def _text_of(error: Exception) -> str:
    # Some of them carry no text.
    return str(error) or type(error).__name__
