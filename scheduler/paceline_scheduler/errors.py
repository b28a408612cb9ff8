"""The scheduler's errors: one tree, mapped once to gRPC status in `api/status.py`.

SchedulerError
├── RequestRefusedError          the caller's request is not taken
│   ├── InvalidRequestError      a field is wrong (names it)
│   ├── UnsupportedError         a field or call this version does not support (names it)
│   ├── UnauthenticatedError     who calls is not known
│   │   └── TokenRevokedError    the token of a running call is gone; with another one it can go on
│   ├── PermissionDeniedError    who calls is known, and may not do this
│   ├── DuplicateRequestError    the request id is in use
│   ├── StaleAttachmentError     a newer attachment has the request
│   ├── ResumeMismatchError      what the client says it holds is not what the request has
│   ├── UnknownRequestError      no such request for this tenant
│   ├── UnknownModelError        no attached executor serves this model
│   ├── UnknownExecutorError     no executor of this address
│   ├── ExecutorLeavingError     the executor goes by itself, and cannot be taken back
│   ├── QueueFullError           try again later (says when)
│   │   └── TenantLimitError     the tenant has as much as it may have (says when to try again)
│   ├── NoExecutorError          nothing to run it on now (says when to try again)
│   │   └── StandbyError         another scheduler drives the executors (says where)
│   └── DrainingError            this scheduler is going away
├── RequestFailedError           a request that was taken has failed
│   ├── DeadlineExceededError    its timeout passed
│   │   └── DeadlineUnreachableError  its timeout would have passed; it was not started
│   ├── ExecutorFailedError      the executor reported a failure of this request alone
│   │   ├── NoTokenLeftError     what the request itself excludes leaves no token to draw
│   │   └── StepFailedError      a step that ran nothing else failed
│   ├── NoLongerServedError      the executors that could hold it are gone for good
│   ├── QuarantinedError         executors die of it
│   ├── SlowConsumerError        its client left too much output unread
│   ├── SupersededError          its client attached to it anew; this stream is not the request's any more
│   └── GivenUpError             this scheduler stops running it; sent again it is served (says when)
├── ConfigError                  an option of the command line cannot be meant; the process ends
│   └── TokenFileError           the file of tokens cannot be read
├── PortError                    a port cannot be listened on; the process ends
├── DivergenceError              executor and scheduler disagree; the link attaches again
└── LinkError                    the connection to an executor failed; never leaves the link
    ├── UnreachableError         nothing answers at the address, or nothing that can be believed
    │   └── IncredibleTermError  it tells of a term that no scheduler can have come to
    ├── StreamEndedError         the plan stream ended
    │   └── StillLoadingError    the executor answers, and loads its model
    ├── UnlikeExecutorError      another executor serves another model under the same name
    ├── ProtocolMismatchError    no version of the plan protocol in common
    ├── TermSupersededError      a scheduler of a higher term drives the executor
    ├── StandingByError          given up because another scheduler has taken over
    └── TermRaisedError          given up to be attached anew under a higher term
"""

from paceline_scheduler.holder import Holder


class SchedulerError(Exception):
    """Base of every error the scheduler raises on purpose."""


class RequestRefusedError(SchedulerError):
    """A request that is not taken; nothing was done for it."""


class InvalidRequestError(RequestRefusedError):
    """A field of the request is wrong. `field` is its path in the message, such as `sampling.top_p`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class UnsupportedError(RequestRefusedError):
    """A field or call that this version knows but does not support. `feature` names it."""

    def __init__(self, feature: str, message: str | None = None) -> None:
        super().__init__(message or f"{feature} is not supported by this version; leave it unset")
        self.feature = feature


class UnauthenticatedError(RequestRefusedError):
    """The call shows no token or certificate that is known here."""


class TokenRevokedError(UnauthenticatedError):
    """The token of a running call was removed. Its requests can be resumed with another token of the same tenant."""


class PermissionDeniedError(RequestRefusedError):
    """The caller may not make this call, or names a tenant that is not its own."""


class DuplicateRequestError(RequestRefusedError):
    """A request of the same tenant and id is running."""


class StaleAttachmentError(RequestRefusedError):
    """A newer attachment of the client has the request, or had it."""


class ResumeMismatchError(RequestRefusedError):
    """What the client says it holds of a request differs from what the request has, or from what it was."""


class UnknownRequestError(RequestRefusedError):
    """The tenant has no request of this id."""


class UnknownModelError(RequestRefusedError):
    """No executor serves a model of this name."""


class UnknownExecutorError(RequestRefusedError):
    """The scheduler knows no executor of this address."""


class ExecutorLeavingError(RequestRefusedError):
    """The executor drains because it was told to end, not because an operator drained it here."""


class RetryableRefusalError(RequestRefusedError):
    """A refusal that may not hold later. `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RetryableRefusalError):
    """The queue is at its bound, in requests or in tokens."""


class TenantLimitError(QueueFullError):
    """A bound of the tenant; others are not refused for it."""


class NoExecutorError(RetryableRefusalError):
    """No executor is attached."""


class StandbyError(NoExecutorError):
    """Another scheduler, `active`, drives the executors: what is asked for is there, or here when that one has died."""

    def __init__(self, active: Holder, retry_after_s: float) -> None:
        where = active.address or f"scheduler {active.scheduler_id}, whose address is not known,"
        super().__init__(f"this scheduler stands by; {where} serves (term {active.term})", retry_after_s)
        self.active = active


class DrainingError(RetryableRefusalError):
    """The scheduler finishes what it has and takes nothing new."""


class RequestFailedError(SchedulerError):
    """A request that was taken has ended without its output being complete."""


class DeadlineExceededError(RequestFailedError):
    """The request's timeout passed."""


class DeadlineUnreachableError(DeadlineExceededError):
    """The request could not have ended before its timeout, whatever else was to do: nothing was computed for it."""


class ExecutorFailedError(RequestFailedError):
    """The executor reported that this request failed; `reason` is the executor's upper-case reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoTokenLeftError(ExecutorFailedError):
    """The request's own rules mask every token of the vocabulary; sent again it fails again."""

    EXECUTOR_REASON = "NO_TOKEN_LEFT"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.EXECUTOR_REASON)


class StepFailedError(ExecutorFailedError):
    """A step of the request failed on the executor while it ran nothing else: memory ran out, or worse."""

    EXECUTOR_REASON = "STEP_FAILED"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.EXECUTOR_REASON)


class NoLongerServedError(RequestFailedError):
    """The executors that could have held the request are gone, and what is left never can."""


class QuarantinedError(RequestFailedError):
    """Executors died while running the request, the last one while it ran nothing else."""


class SupersededError(RequestFailedError):
    """The client attached to the request anew: only this stream of it has ended."""


class SlowConsumerError(RequestFailedError):
    """The client of the request left more output unread than may wait for it."""


class GivenUpError(RequestFailedError):
    """This scheduler stops running the request: it is shutting down, or another scheduler, `active`, has taken over.

    Sent again after `retry_after_s` it is served, by whoever is in charge then.
    """

    def __init__(self, message: str, retry_after_s: float, active: Holder | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.active = active


class ConfigError(SchedulerError):
    """An option of the command line cannot be meant; the message names it."""


class TokenFileError(ConfigError):
    """The file of tokens is missing, or a line of it cannot be meant; the sentence names the line."""


class PortError(SchedulerError):
    """A port is in use, or the address is not this machine's."""


class DivergenceError(SchedulerError):
    """A result does not fit the plans that were sent. The stream ends; attaching again repairs it."""


class LinkError(SchedulerError):
    """The connection to an executor failed. The link tries again; `message` is for the log and for operators."""


class UnreachableError(LinkError):
    """Nothing answers at the address: nobody listens, its name is unknown, or what answers cannot be believed."""


class IncredibleTermError(UnreachableError):
    """The executor tells of a term that no scheduler can have come to."""

    def __init__(self, term: int) -> None:
        super().__init__(f"it reports term {term}, which no scheduler can have reached; restart this executor")
        self.term = term


class StreamEndedError(LinkError):
    """The plan stream ended, or a peer that should answer did not in time."""


class StillLoadingError(StreamEndedError):
    """The executor is there and has not loaded its model yet."""


class UnlikeExecutorError(LinkError):
    """An executor's model is not what another executor serves under the same name; give one of them another name."""

    def __init__(self, model: str, reported: str, served: str) -> None:
        super().__init__(
            f"it has {reported} for model {model!r}, which another executor serves with {served};"
            " start one of them with another --served-model-name"
        )


class ProtocolMismatchError(LinkError):
    """The executor speaks no version of the plan protocol that this scheduler speaks; the message names both."""


class TermSupersededError(LinkError):
    """A scheduler of a higher term drives the executor."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"{holder} drives it")
        self.holder = holder


class TermRaisedError(LinkError):
    """The plan stream was given up because this scheduler's claim has risen: it shall have one claim everywhere."""


class StandingByError(LinkError):
    """The plan stream was given up because another scheduler has taken over."""
