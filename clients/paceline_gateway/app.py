"""Which endpoint answers what: the ASGI application.

Knows paths and statuses. Whatever goes wrong becomes an error of OpenAI's form here.
"""

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.process.metrics import Meter
from paceline_client import Model, PacelineError, RequestTimeoutError, UnavailableError
from paceline_gateway.admin_port import AdminPort
from paceline_gateway.answers import encoded
from paceline_gateway.bodies import DetokenizeBody, TokenizeBody, read_body
from paceline_gateway.clients import Clients
from paceline_gateway.conversation import turns
from paceline_gateway.errors import ApiError, api_error, refused
from paceline_gateway.exchange import Exchange, GoneError
from paceline_gateway.generation import Generation
from paceline_gateway.metrics import ANSWERS, SECONDS
from paceline_gateway.page import static_routes

_GONE = 499  # as proxies count it; nobody reads it
_SEVERAL_SLASHES = re.compile("/{2,}")
_EXPOSED = ("x-request-id", "x-paceline-ignored", "retry-after", "retry-after-ms", "x-should-retry")
# Texts that begin differently: what their tokens begin with in common begins every text.
_PROBES = ("a", "1")

Serve = Callable[[Exchange], Awaitable[None]]
_log = structlog.get_logger(__name__)


class JsonEndpoint:
    """Serves requests of one path, and counts them."""

    def __init__(self, name: str, serve: Serve, meter: Meter) -> None:
        self._name = name
        self._serve = serve
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, began_s = Exchange(scope, receive, send), time.monotonic()
        try:
            await self._answer(exchange)
        except GoneError:
            exchange.status = _GONE
        finally:
            status = exchange.status or _GONE
            self._meter.add(ANSWERS.name, 1, self._name, str(status))
            self._meter.observe(SECONDS.name, time.monotonic() - began_s, self._name)
            _log.debug("answered", endpoint=self._name, status=status, x_request_id=exchange.request_id)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._serve(exchange)
        except ApiError as error:
            await exchange.fail(error)
        except PacelineError as error:
            if error.reason == "LEFT":  # by us, because the client is gone
                raise GoneError from None
            answer = api_error(error, self._name)
            _log.info(
                "request_failed", endpoint=self._name, status=answer.status, reason=error.reason, error=error.message,
                x_request_id=exchange.request_id,
            )  # fmt: skip
            await exchange.fail(answer)
        except GoneError:
            raise
        except Exception:
            _log.exception("request_failed", endpoint=self._name, x_request_id=exchange.request_id)
            await exchange.fail(ApiError(500, "the gateway failed; its log says more", kind="server_error"))


class ShortCalls:
    """The endpoints beside generation."""

    def __init__(self, clients: Clients, admin: AdminPort, is_draining: Callable[[], bool]) -> None:
        self._clients = clients
        self._admin = admin
        self._is_draining = is_draining
        self.was_asked_ready = False
        """Somebody looks whether requests should come here."""

    async def models(self, exchange: Exchange) -> None:
        async with self._clients.of(exchange.bearer) as client:
            found = await client.list_models()
        await exchange.answer(encoded({"object": "list", "data": [_shown(model) for model in found]}))

    async def model(self, exchange: Exchange) -> None:
        async with self._clients.of(exchange.bearer) as client:
            found = await client.get_model(exchange.path.removeprefix("/v1/models/"))
        await exchange.answer(encoded(_shown(found)))

    async def tokenize(self, exchange: Exchange) -> None:
        body, exchange.ignored = read_body(TokenizeBody, await exchange.body())
        if (body.prompt is None) == (body.messages is None):
            raise refused("prompt", "give this or messages")
        messages = None if body.messages is None else turns(body.messages)
        async with self._clients.of(exchange.bearer) as client:
            tokens = await client.tokenize(
                body.prompt, messages=messages, model=body.model, with_texts=bool(body.return_token_strs)
            )
            num_left_out = 0
            if body.add_special_tokens is False and messages is None:
                one, other = [(await client.tokenize(text, model=body.model)).token_ids for text in _PROBES]
                num_left_out = next(
                    (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0
                )
        token_ids, texts = tokens.token_ids[num_left_out:], tokens.token_texts[num_left_out:]
        await exchange.answer(
            encoded(
                {
                    "count": len(token_ids),
                    "max_model_len": tokens.max_model_len,
                    "tokens": token_ids,
                    "token_strs": texts if body.return_token_strs else None,
                }
            )
        )

    async def detokenize(self, exchange: Exchange) -> None:
        body, exchange.ignored = read_body(DetokenizeBody, await exchange.body())
        async with self._clients.of(exchange.bearer) as client:
            text = await client.detokenize(body.tokens, model=body.model, skip_special_tokens=False)
        await exchange.answer(encoded({"prompt": text}))

    async def fleet(self, exchange: Exchange) -> None:
        found = await self._admin.fleet(exchange.bearer)
        await exchange.answer(encoded(found), headers=[(b"cache-control", b"no-store")])

    async def health(self, exchange: Exchange) -> None:
        await exchange.answer(b"{}")

    async def ready(self, exchange: Exchange) -> None:
        """A scheduler answers, be it that it asks for a key."""
        self.was_asked_ready = True
        if self._is_draining():
            raise ApiError(503, "the gateway is shutting down", kind="server_error", code="draining")
        try:
            async with self._clients.of(None) as client:
                await client.list_models()
        except (UnavailableError, RequestTimeoutError) as error:
            raise ApiError(503, error.message, kind="server_error", code="unavailable") from None
        except PacelineError:
            pass
        await exchange.answer(b"{}")

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer(encoded({"version": version("paceline")}))


def _shown(model: Model) -> dict[str, object]:
    # When it was made nobody says; the field must be there.
    return {
        "id": model.name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": model.max_model_len,
    }  # fmt: skip


def make_app(generation: Generation, services: ShortCalls, meter: Meter, cors_origins: Sequence[str] = ()) -> ASGIApp:
    def route(path: str, serve: Serve, method: str, name: str) -> Route:
        return Route(path, JsonEndpoint(name, serve, meter), methods=[method])

    routes = [
        route("/v1/chat/completions", generation.chat, "POST", "chat/completions"),
        route("/v1/completions", generation.completion, "POST", "completions"),
        route("/v1/responses", generation.response, "POST", "responses"),
        route("/v1/models", services.models, "GET", "models"),
        route("/v1/models/{model:path}", services.model, "GET", "models"),
        route("/tokenize", services.tokenize, "POST", "tokenize"),
        route("/detokenize", services.detokenize, "POST", "detokenize"),
        route("/health", services.health, "GET", "health"),
        route("/ready", services.ready, "GET", "ready"),
        route("/version", services.version, "GET", "version"),
        route("/fleet", services.fleet, "GET", "fleet"),
        *static_routes(),
    ]
    origins = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
    app = Starlette(
        routes=routes, middleware=[origins] if cors_origins else [], exception_handlers={HTTPException: _no_endpoint}
    )

    async def with_plain_path(scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = _SEVERAL_SLASHES.sub("/", scope["path"])  # open-webui asks for /v1//models
        await app(scope, receive, send)

    return with_plain_path


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    answer = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return Response(answer.body, error.status_code, error.headers, media_type="application/json")
