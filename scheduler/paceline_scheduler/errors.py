"""The scheduler's errors: one tree, mapped once to gRPC status in `api/status.py`.

SchedulerError
    RequestRefusedError
        InvalidRequestError
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

if TYPE_CHECKING:  # with numpy, which is not needed before the ports are open
    from paceline.plan.values import Claim


class SchedulerError(Exception):
    """The scheduler raises it on purpose."""


class RequestRefusedError(SchedulerError):
    """Nothing was done for it."""


class InvalidRequestError(RequestRefusedError):
    """`field` is its path in the message, such as `sampling.top_p`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class UnsupportedError(RequestRefusedError):
    """`feature` names the field or call."""

    def __init__(self, feature: str, message: str | None = None) -> None:
        super().__init__(message or f"{feature} is not supported by this version; leave it unset")
        self.feature = feature


class UnauthenticatedError(RequestRefusedError):
    """The call shows no token or certificate that is known here."""


class TokenRevokedError(UnauthenticatedError):
    """The token of a running call was removed. Its requests can be resumed with another one of the same tenant."""


class PermissionDeniedError(RequestRefusedError):
    """The caller may not make this call, or names a tenant that is not its own."""


class DuplicateRequestError(RequestRefusedError):
    """A request of the same tenant and id is running."""


class StaleAttachmentError(RequestRefusedError):
    """A newer attachment of the client has the request, or had it."""


class ResumeMismatchError(RequestRefusedError):
    """What the client says it holds is not what the request has."""


class UnknownRequestError(RequestRefusedError):
    pass


class UnknownModelError(RequestRefusedError):
    pass


class UnknownExecutorError(RequestRefusedError):
    pass


class NoRecordDirError(RequestRefusedError):
    """The scheduler was given no folder for recordings."""


class TooManyWatchersError(RequestRefusedError):
    """As many calls as are allowed watch steps."""


class ExecutorLeavingError(RequestRefusedError):
    """The executor itself was told to end: no operator drained it here."""


class RetryableRefusalError(RequestRefusedError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RetryableRefusalError):
    """The queue is at its bound, in requests or in tokens."""


class TenantLimitError(QueueFullError):
    """Others are not refused for it."""


class NoExecutorError(RetryableRefusalError):
    pass


class StandbyError(NoExecutorError):
    def __init__(self, active: "Claim", retry_after_s: float) -> None:
        where = active.address or f"scheduler {active.scheduler_id}, whose address is not known,"
        super().__init__(f"this scheduler stands by; {where} serves (term {active.term})", retry_after_s)
        self.active = active


class DrainingError(RetryableRefusalError):
    pass


class RequestFailedError(SchedulerError):
    """It was taken, and ended without its output being complete."""


class DeadlineExceededError(RequestFailedError):
    pass


class DeadlineUnreachableError(DeadlineExceededError):
    """Nothing was computed for it: it could not have ended in time, whatever else was to do."""


class ExecutorFailedError(RequestFailedError):
    """`reason` is the executor's upper-case reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoTokenLeftError(ExecutorFailedError):
    """The request's own rules mask every token; sent again it fails again."""

    EXECUTOR_REASON = "NO_TOKEN_LEFT"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.EXECUTOR_REASON)


class StepFailedError(ExecutorFailedError):
    """A step failed while it ran nothing else: memory ran out, or worse."""

    EXECUTOR_REASON = "STEP_FAILED"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.EXECUTOR_REASON)


class NoLongerServedError(RequestFailedError):
    """The executors that could have held it are gone, and what is left never can."""


class OutageError(RequestFailedError):
    """It has waited for an executor of its model for as long as it may. Sent again it waits anew."""

    def __init__(self, model: str, max_outage_s: float) -> None:
        of_model = f" of the model {model!r}" if model else ""
        super().__init__(f"no executor{of_model} came within {max_outage_s:g} s; start one, or allow more time")


class QuarantinedError(RequestFailedError):
    """Executors died while running it, the last one while it ran nothing else."""


class SupersededError(RequestFailedError):
    """The client attached anew: only this stream of the request has ended."""


class SlowConsumerError(RequestFailedError):
    """The client left more output unread than may wait."""


class GivenUpError(RequestFailedError):
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


class DivergenceError(SchedulerError):
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
