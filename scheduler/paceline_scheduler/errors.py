"""The scheduler's errors: one tree. What a status tells beside code and reason is in `api/status.py`.

SchedulerError
    RequestRefusedError
        InvalidRequestError
            PromptTooLongError
            InvalidFormError
        UnsupportedError
        UnauthenticatedError
            TokenRevokedError
        PermissionDeniedError
        DuplicateRequestError
        StaleAttachmentError
        ResumeMismatchError
        UnknownRequestError
        UnknownModelError
        UnknownExecutorError
        NoRecordDirError
        TooManyWatchersError
        ExecutorLeavingError
        RetryableRefusalError
            QueueFullError
                TenantLimitError
            NoExecutorError
                StandbyError
            DrainingError
    RequestFailedError
        DeadlineExceededError
            DeadlineUnreachableError
        ExecutorFailedError
            FormTooCostlyError
            NoTokenLeftError
            StepFailedError
        NoLongerServedError
        OutageError
        QuarantinedError
        SlowConsumerError
        SupersededError
        GivenUpError
    ConfigError
        TokenFileError
    RecordingError
    DivergenceError
    LinkError
        UnreachableError
            IncredibleTermError
        StreamEndedError
            LateStepError
            StillLoadingError
        UnlikeExecutorError
        ProtocolMismatchError
        TermSupersededError
        StandingByError
        TermRaisedError
"""

from typing import TYPE_CHECKING

from paceline.plan.codes import Code, CodedError

if TYPE_CHECKING:  # with numpy, which is not needed before the ports are open
    from paceline.plan.values import Claim


class SchedulerError(CodedError):
    """The scheduler raises it on purpose."""


class RequestRefusedError(SchedulerError, code=Code.FAILED_PRECONDITION, reason="REFUSED"):
    """Nothing was done for it."""


class InvalidRequestError(RequestRefusedError, code=Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
    """`field` is its path in the message, such as `sampling.top_p`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class PromptTooLongError(InvalidRequestError, reason="PROMPT_TOO_LONG"):
    """The context of the model cannot hold it."""


class InvalidFormError(InvalidRequestError):
    """Of a structured output; `reason` is one of `paceline.forms`."""

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(field, message)
        self.reason = reason


class UnsupportedError(RequestRefusedError, code=Code.UNIMPLEMENTED, reason="UNSUPPORTED"):
    """`feature` names the field or call."""

    def __init__(self, feature: str, message: str | None = None) -> None:
        super().__init__(message or f"{feature} is not supported by this version; leave it unset")
        self.feature = feature


class UnauthenticatedError(RequestRefusedError, code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """The call shows no token or certificate that is known here."""


class TokenRevokedError(UnauthenticatedError, reason="TOKEN_REVOKED"):
    """The token of a running call was removed. Its requests can be resumed with another one of the same tenant."""


class PermissionDeniedError(RequestRefusedError, code=Code.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """The caller may not make this call, or names a tenant that is not its own."""


class DuplicateRequestError(RequestRefusedError, code=Code.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"):
    """A request of the same tenant and id is running."""


class StaleAttachmentError(RequestRefusedError, code=Code.ABORTED, reason="STALE_ATTACHMENT"):
    """A newer attachment of the client has the request, or had it."""

    def __init__(self, message: str, newest: int = 0) -> None:
        super().__init__(message)
        self.newest = newest


class ResumeMismatchError(RequestRefusedError, reason="RESUME_MISMATCH"):
    """What the client says it holds is not what the request has."""


class UnknownRequestError(RequestRefusedError, code=Code.NOT_FOUND, reason="UNKNOWN_REQUEST"):
    pass


class UnknownModelError(RequestRefusedError, code=Code.NOT_FOUND, reason="UNKNOWN_MODEL"):
    pass


class UnknownExecutorError(RequestRefusedError, code=Code.NOT_FOUND, reason="UNKNOWN_EXECUTOR"):
    pass


class NoRecordDirError(RequestRefusedError, reason="NO_RECORD_DIR"):
    """The scheduler was given no folder for recordings."""


class TooManyWatchersError(RequestRefusedError, code=Code.RESOURCE_EXHAUSTED, reason="TOO_MANY_WATCHERS"):
    """As many calls as are allowed watch steps."""


class ExecutorLeavingError(RequestRefusedError, reason="EXECUTOR_LEAVING"):
    """The executor itself was told to end: no operator drained it here."""


class RetryableRefusalError(RequestRefusedError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RetryableRefusalError, code=Code.RESOURCE_EXHAUSTED, reason="QUEUE_FULL"):
    """The queue is at its bound, in requests or in tokens."""


class TenantLimitError(QueueFullError, reason="TENANT_LIMIT"):
    """Others are not refused for it."""


class NoExecutorError(RetryableRefusalError, code=Code.UNAVAILABLE, reason="NO_EXECUTOR"):
    pass


class StandbyError(NoExecutorError, reason="STANDBY"):
    def __init__(self, active: "Claim", retry_after_s: float) -> None:
        where = active.address or f"scheduler {active.scheduler_id}, whose address is not known,"
        super().__init__(f"this scheduler stands by; {where} serves (term {active.term})", retry_after_s)
        self.active = active


class DrainingError(RetryableRefusalError, code=Code.UNAVAILABLE, reason="DRAINING"):
    pass


class RequestFailedError(SchedulerError, reason="FAILED"):
    """It was taken, and ended without its output being complete."""


class DeadlineExceededError(RequestFailedError, code=Code.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    pass


class DeadlineUnreachableError(DeadlineExceededError, reason="DEADLINE_UNREACHABLE"):
    """Nothing was computed for it: it could not have ended in time, whatever else was to do."""


class ExecutorFailedError(RequestFailedError, reason="EXECUTOR_FAILED"):
    """`executor_reason` is the executor's upper-case reason."""

    def __init__(self, message: str, executor_reason: str) -> None:
        super().__init__(message)
        self.executor_reason = executor_reason


class NoTokenLeftError(ExecutorFailedError, code=Code.FAILED_PRECONDITION, reason="NO_TOKEN_LEFT"):
    """The request's own rules mask every token; sent again it fails again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, self.reason)


class FormTooCostlyError(ExecutorFailedError, code=Code.INVALID_ARGUMENT, reason="STRUCTURED_FAILED"):
    """Its output's form takes more than a step may; sent again it fails again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, self.reason)


class StepFailedError(ExecutorFailedError, reason="STEP_FAILED"):
    """A step failed while it ran nothing else: memory ran out, or worse."""

    def __init__(self, message: str) -> None:
        super().__init__(message, self.reason)


class NoLongerServedError(RequestFailedError, code=Code.FAILED_PRECONDITION, reason="NO_LONGER_SERVED"):
    """The executors that could have held it are gone, and what is left never can."""


class OutageError(RequestFailedError, code=Code.UNAVAILABLE, reason="NO_EXECUTOR"):
    """It has waited for an executor of its model for as long as it may. Sent again it waits anew."""

    def __init__(self, model: str, max_outage_s: float) -> None:
        of_model = f" of the model {model!r}" if model else ""
        super().__init__(f"no executor{of_model} came within {max_outage_s:g} s; start one, or allow more time")


class QuarantinedError(RequestFailedError, reason="EXECUTORS_DIED"):
    """Executors died while running it, the last one while it ran nothing else."""


class SupersededError(RequestFailedError, code=Code.ABORTED, reason="STALE_ATTACHMENT"):
    """The client attached anew: only this stream of the request has ended."""


class SlowConsumerError(RequestFailedError, code=Code.RESOURCE_EXHAUSTED, reason="SLOW_CONSUMER"):
    """The client left more output unread than may wait."""


class GivenUpError(RequestFailedError, code=Code.UNAVAILABLE, reason="GIVEN_UP"):
    """This scheduler shuts down, or another one, `active`, has taken over.

    Sent again after `retry_after_s` the request is served by whoever is in charge then.
    """

    def __init__(self, message: str, retry_after_s: float, active: "Claim | None" = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.active = active


class ConfigError(SchedulerError):
    """The message names the option."""


class TokenFileError(ConfigError):
    """The file is missing, or a line of it cannot be meant; the sentence names the line."""


class RecordingError(SchedulerError):
    """A file is no recording, or none that this program can read."""


class DivergenceError(SchedulerError, reason="DIVERGENCE"):
    """A result does not fit the plans that were sent. Attaching again repairs it."""


class LinkError(SchedulerError):
    """The link tries again; the message is for the log and for operators."""


class UnreachableError(LinkError):
    """Nobody listens there, its name is unknown, or what answers cannot be believed."""


class IncredibleTermError(UnreachableError):
    def __init__(self, term: int) -> None:
        super().__init__(f"it reports term {term}, which no scheduler can have reached; restart this executor")
        self.term = term


class StreamEndedError(LinkError):
    """Also when a peer that should answer did not in time."""


class LateStepError(StreamEndedError):
    """The executor is there, and its step has not ended in time."""


class StillLoadingError(StreamEndedError):
    """The executor is there, its model not loaded yet."""


class UnlikeExecutorError(LinkError):
    def __init__(self, model: str, reported: str, served: str) -> None:
        super().__init__(
            f"it has {reported} for model {model!r}, which another executor serves with {served};"
            " start one of them with another --served-model-name"
        )


class ProtocolMismatchError(LinkError):
    """The message names the versions of both."""


class TermSupersededError(LinkError):
    def __init__(self, holder: "Claim") -> None:
        super().__init__(f"{holder} drives it")
        self.holder = holder


class TermRaisedError(LinkError):
    """This scheduler's claim has risen: it shall have one claim everywhere."""


class StandingByError(LinkError):
    """Another scheduler has taken over."""
