"""What every gRPC server of the scheduler has: its options, and the outermost interceptor, which asks who calls."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from google.protobuf.message import DecodeError

from paceline.process import ports
from paceline.process.rpc import Call, CallGuard
from paceline.process.statuses import ErrorStatus
from paceline.process.trace_ids import trace_fields
from paceline_scheduler.api import status
from paceline_scheduler.api.call_spans import CallSpans
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.errors import InvalidRequestError, SchedulerError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *ports.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Who connects and says nothing keeps a descriptor, by default for two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Against opening and resetting streams in a loop. A session carries any number of requests.
    ("grpc.max_concurrent_streams", 1024),
    # Frequent pings are not punished.
    ("grpc.http2.max_pings_without_data", 0),
)


class Guard(CallGuard):
    expected = (SchedulerError,)

    def __init__(self, access: Access | None = None, calls: CallSpans | None = None) -> None:
        super().__init__()
        self._access = access or Access()
        self._calls = calls or CallSpans()

    @contextmanager
    def admitted(self, call: Call) -> Iterator[None]:
        method, context = call.method, call.context
        is_single = not call.has_many_answers
        span = self._calls.of(method, context.invocation_metadata() or ()) if is_single else nullcontext()
        with span, self._access.admitted(method, context):
            yield

    def malformed(self, error: DecodeError) -> InvalidRequestError:  # noqa: ARG002  it says nothing to clients
        return InvalidRequestError(
            "message", "is not a message of this call; generate the stubs from the protos of this release"
        )

    def describe(self, error: BaseException) -> ErrorStatus:
        return status.describe(error)

    def about(self, call: Call) -> dict[str, str]:
        request_id, tenant = (getattr(call.message, name, "") for name in ("request_id", "tenant"))
        names = {"request_id": request_id, "tenant": tenant} if request_id else {}
        return {**names, **trace_fields(getattr(call.message, "trace_parent", ""))}
