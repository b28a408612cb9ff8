"""An executor that lies, over real sockets: every call that attaches gets the next script of what to send."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc.aio

from paceline.v1 import executor_pb2, inference_pb2, plan_pb2

NUM_ADDRESSES = 48

_SERVICE = "paceline.v1.ExecutorService"
_BEAT = plan_pb2.AttachResponse(heartbeat=inference_pb2.Heartbeat()).SerializeToString()
_BEAT_S = 0.2
_MAX_TRIES = 3

Answer = Callable[[plan_pb2.BatchPlan], Iterable[plan_pb2.AttachResponse]]


def welcome(name: str = "rogue", digest: str = "rogue") -> plan_pb2.Welcome:
    """Any scheduler believes it."""
    return plan_pb2.Welcome(
        incarnation=1,
        epoch=1,
        protocol=2,
        model=inference_pb2.Model(name=name, architecture="rogue", max_model_len=64, vocab_size=1000),
        geometry=plan_pb2.KvGeometry(num_blocks=32, block_size=4),
        limits=plan_pb2.ExecutorLimits(
            max_num_rows=8, max_num_batched_tokens=32, max_model_len=64, max_plans_in_flight=4
        ),
        tag_key=bytes(32),
        tokenizer_digest=digest,
    )


@dataclass(frozen=True, slots=True)
class Script:
    """`messages` follow the hello; `answer` is for each plan."""

    name: str
    messages: tuple[plan_pb2.AttachResponse, ...] = ()
    answer: Answer = lambda _: ()
    info: executor_pb2.GetInfoResponse | None = None
    tokenizer: tuple[executor_pb2.GetTokenizerResponse, ...] = ()


@dataclass(slots=True)
class RogueExecutor:
    """One script after another, however many calls there are; when none is left it is silent.

    It listens on 127.0.0.1 to 127.0.0.48, each of which is an executor for schedulers.
    """

    scripts: deque[Script] = field(default_factory=deque)
    port: int = 0
    incarnations: "count[int]" = field(default_factory=lambda: count(7))
    begun: "Counter[str]" = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)  # scripts said to the end, or cut off again and again

    def addresses(self, num_addresses: int) -> tuple[str, ...]:
        return tuple(f"127.0.0.{number}:{self.port}" for number in range(1, num_addresses + 1))

    async def get_info(self, request: bytes, context: Any) -> bytes:  # noqa: ANN401, ARG002  # as gRPC calls it
        script = self.scripts[0] if self.scripts else None
        if script is not None and script.info is not None:
            self.told.append(self.scripts.popleft().name)
            return script.info.SerializeToString()
        return executor_pb2.GetInfoResponse(incarnation=next(self.incarnations)).SerializeToString()

    async def get_tokenizer(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401, ARG002
        parts: tuple[executor_pb2.GetTokenizerResponse, ...] = ()
        if self.scripts and self.scripts[0].tokenizer:
            script = self.scripts.popleft()
            self.told.append(script.name)
            parts = script.tokenizer
        for part in parts or (executor_pb2.GetTokenizerResponse(digest="rogue", tokenizer_json=b"[]", last=True),):
            yield part.SerializeToString()

    async def attach(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401, ARG002
        await anext(requests)
        while not self.scripts or self.scripts[0].info is not None or self.scripts[0].tokenizer:
            yield _BEAT
            await asyncio.sleep(_BEAT_S)
        script = self.scripts.popleft()
        self.begun[script.name] += 1
        was_sent = False
        try:
            for message in script.messages:
                yield self._fresh(message).SerializeToString()
            was_sent = True
        finally:
            # A scheduler may have ended the call before it heard any of it.
            if was_sent or self.begun[script.name] == _MAX_TRIES:
                self.told.append(script.name)
            else:
                self.scripts.appendleft(script)
        async for data in requests:
            request = plan_pb2.AttachRequest.FromString(data)
            for plan in (request.plan,) if request.HasField("plan") else request.plans.plans:
                for message in script.answer(plan):
                    yield message.SerializeToString()
            yield _BEAT

    def _fresh(self, message: plan_pb2.AttachResponse) -> plan_pb2.AttachResponse:
        """A known process is not attached again."""
        if message.WhichOneof("message") != "welcome":
            return message
        fresh = plan_pb2.AttachResponse()
        fresh.CopyFrom(message)
        fresh.welcome.incarnation = next(self.incarnations)
        return fresh


@asynccontextmanager
async def rogue_executor() -> AsyncIterator[RogueExecutor]:
    rogue = RogueExecutor()
    server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
    handlers: dict[str, Any] = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(rogue.get_info),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(rogue.get_tokenizer),
        "Attach": grpc.stream_stream_rpc_method_handler(rogue.attach),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    rogue.port = server.add_insecure_port("127.0.0.1:0")
    for address in rogue.addresses(NUM_ADDRESSES)[1:]:
        server.add_insecure_port(address)
    await server.start()
    try:
        yield rogue
    finally:
        await server.stop(0)
