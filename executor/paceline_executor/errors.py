"""The executor's errors: one tree, mapped once to gRPC status by the service.

    ExecutorError
    ├── ModelError
    │   ├── ModelNotFoundError      nothing there, or an unknown name
    │   ├── ModelCorruptError       there, but damaged, truncated or hostile
    │   ├── UnsupportedModelError   sound, but of a kind this version does not run
    │   └── ModelFetchError         a model that could not be downloaded, checked or stored
    │       └── HubUnreachableError the Hugging Face hub gave no usable answer
    ├── StartError                  the process cannot start
    │   ├── PortError               a port in use, or an address that is not this machine's
    │   ├── ShortMemoryError        too little memory for weights and KV cache
    │   ├── LimitError              a limit or option asked for that model or device does not allow
    │   │   └── DrafterError        a drafter that cannot draft for the model
    │   ├── MissingDeviceError      a GPU asked for that is not there or cannot be used
    │   └── StepTimesError          a file of step times that cannot be read or used
    ├── DeviceError                 steps fail whatever is in them; the process ends
    │   └── DeviceFaultError        the device failed while it computed
    ├── ServiceError                ends a call or a plan stream; carries a reason for programs
    │   ├── NotReadyError           the model is loading, or failed to load
    │   ├── DrainingError           the executor is going away
    │   ├── UnsupportedCallError    a call of a later version
    │   ├── MalformedMessageError   bytes that are no message of the call
    │   ├── NotAllowedError         the caller's certificate is not of one who may
    │   ├── AttachError             a stream that does not begin, or talk, as the protocol wants
    │   ├── ProtocolError           no protocol version in common
    │   ├── TermSupersededError     a scheduler of a higher term holds, or held, the executor
    │   ├── TooManySchedulersError  too many schedulers wait for this one already
    │   ├── EpochEndedError         a newer Attach was accepted
    │   ├── StepWedgedError         a step does not end within its bound
    │   ├── StaleEpochError         a plan of another incarnation or epoch
    │   ├── PlanOrderError          a plan out of order
    │   ├── TooManyPlansError       more plans unanswered than allowed
    │   ├── PlanError               a malformed plan; its fault says in what way
    │   ├── UnsupportedPlanError    a plan that uses what a later version will do
    │   └── StepFailedError         a step failed as a whole
    └── RequestError                one request fails alone
        ├── InvalidFieldError       a field out of range
        ├── UnsupportedFieldError   a field that a later version will honour
        └── NumericError            the model produced no usable number for it

Knows sentences only. Every message names what was wrong and what to do about it, in one line.
"""

import enum
from collections.abc import Mapping


class ExecutorError(Exception):
    """Base of every error the executor raises on purpose; `str(error)` is one sentence fit for a user."""


class ModelError(ExecutorError):
    """The model given to the executor cannot be served."""


class ModelNotFoundError(ModelError):
    """No such file or folder, or a name that is not in the table of known models."""


class ModelCorruptError(ModelError):
    """The model's files are damaged, truncated or inconsistent; get them again."""


class UnsupportedModelError(ModelError):
    """The model's files are sound, but name a feature that this version does not run."""


class ModelFetchError(ModelError):
    """A model could not be downloaded, verified or stored; the message says what to do."""


class HubUnreachableError(ModelFetchError):
    """The Hugging Face hub cannot be reached, or fails itself; what the cache holds may do instead."""


class StartError(ExecutorError):
    """The process cannot start with this configuration on this machine."""


class PortError(StartError):
    """A port is in use, or the address is not this machine's."""


class ShortMemoryError(StartError):
    """Weights and KV cache do not fit into memory."""


class LimitError(StartError):
    """A limit or an option was asked for that the model or the device does not allow."""


class DrafterError(LimitError):
    """The drafter asked for cannot draft for this model: it has other tokens, or would be no faster."""


class MissingDeviceError(StartError):
    """A GPU was asked for where there is none, or none that is new enough, or nothing to compile for it."""


class StepTimesError(StartError):
    """The file of step times cannot be read, or is no table of them."""


class DeviceError(ExecutorError):
    """Steps fail whatever is in them: this process cannot be of use any more."""


class DeviceFaultError(DeviceError):
    """The device failed while it computed a launched step: nothing that it holds can be trusted or taken back."""


class ServiceError(ExecutorError):
    """Ends a call or a plan stream. `reason` and `metadata` travel to the caller beside the sentence."""

    reason = "INTERNAL"

    def __init__(self, sentence: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.metadata = dict(metadata or {})


class NotReadyError(ServiceError):
    """The model is not loaded yet, or cannot be; try again later."""

    reason = "LOADING"


class DrainingError(ServiceError):
    """The executor is going away; use another one."""

    reason = "DRAINING"


class UnsupportedCallError(ServiceError):
    """The call exists in the protocol, but this version does not answer it."""

    reason = "UNSUPPORTED_CALL"


class MalformedMessageError(ServiceError):
    """The bytes of a call are no message of its type; generate the stubs from this release's protos."""

    reason = "MALFORMED_MESSAGE"


class NotAllowedError(ServiceError):
    """The caller's certificate does not say that it is one who may make this call."""

    reason = "NOT_ALLOWED"


class AttachError(ServiceError):
    """The plan stream does not begin with a valid hello, or a message comes at the wrong time."""

    reason = "ATTACH_MALFORMED"


class ProtocolError(ServiceError):
    """Scheduler and executor speak no protocol version in common."""

    reason = "PROTOCOL_MISMATCH"


class TermSupersededError(ServiceError):
    """A scheduler of a higher (term, scheduler_id) holds the executor, or held it last."""

    reason = "TERM_SUPERSEDED"


class TooManySchedulersError(ServiceError):
    """Too many schedulers wait for this executor already; try again later."""

    reason = "TOO_MANY_SCHEDULERS"


class EpochEndedError(ServiceError):
    """A newer Attach was accepted; this stream's plans have no effect any more."""

    reason = "EPOCH_ENDED"


class StepWedgedError(ServiceError):
    """The running step does not end within its bound, so there is no boundary to take over at."""

    reason = "STEP_WEDGED"


class StaleEpochError(ServiceError):
    """A plan carries an incarnation or epoch that is not the stream's."""

    reason = "STALE_EPOCH"


class PlanOrderError(ServiceError):
    """A plan's step_id is not the next one."""

    reason = "PLAN_OUT_OF_ORDER"


class TooManyPlansError(ServiceError):
    """More plans are unanswered than the limit in the welcome."""

    reason = "TOO_MANY_PLANS"


class PlanFault(enum.StrEnum):
    """In what way a plan is malformed."""

    COLUMN_LENGTH = "COLUMN_LENGTH"
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"
    ROW_OUT_OF_RANGE = "ROW_OUT_OF_RANGE"
    ROW_NOT_IN_USE = "ROW_NOT_IN_USE"
    ROW_IN_USE = "ROW_IN_USE"
    ROW_TWICE = "ROW_TWICE"
    BLOCK_OUT_OF_RANGE = "BLOCK_OUT_OF_RANGE"
    BLOCK_IN_USE = "BLOCK_IN_USE"
    BLOCK_MISSING = "BLOCK_MISSING"
    BLOCK_SHARED = "BLOCK_SHARED"
    BLOCK_INDEX = "BLOCK_INDEX"
    CONTENTS_LOST = "CONTENTS_LOST"
    COPY_NOT_GRANTED = "COPY_NOT_GRANTED"
    TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
    TOKENS_UNKNOWN = "TOKENS_UNKNOWN"
    DRAFTS = "DRAFTS"
    RECORD_ID = "RECORD_ID"
    REQUEST_ALREADY_PLACED = "REQUEST_ALREADY_PLACED"
    CACHED_TOKENS = "CACHED_TOKENS"
    RELEASE_BEYOND_OUTPUT = "RELEASE_BEYOND_OUTPUT"


class PlanError(ServiceError):
    """A malformed plan: it changed nothing, and its stream ends."""

    def __init__(self, fault: PlanFault, sentence: str) -> None:
        super().__init__(sentence)
        self.fault = fault
        self.reason = f"PLAN_{fault.value}"


class UnsupportedPlanError(ServiceError):
    """A plan uses a field that this version does not act on; `metadata` names it."""

    reason = "UNSUPPORTED_FIELD"


class StepFailedError(ServiceError):
    """A step failed as a whole: no row advanced, and its stream ends."""

    reason = "STEP_FAILED"


class RequestError(ExecutorError):
    """One request fails alone; the others of its step go on. `field` names the field at fault, if one is."""

    reason = "INTERNAL"
    code = 13  # of google.rpc.Code, as below: INTERNAL

    def __init__(self, sentence: str, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class InvalidFieldError(RequestError):
    """A field of the request is out of range."""

    reason = "INVALID_FIELD"
    code = 3  # INVALID_ARGUMENT


class UnsupportedFieldError(RequestError):
    """A field of the request that this version does not honour."""

    reason = "UNSUPPORTED_FIELD"
    code = 12  # UNIMPLEMENTED


class NumericError(RequestError):
    """The model produced no usable number for the request, such as NaN logits."""

    reason = "NUMERIC_FAULT"


class NoTokenLeftError(RequestError):
    """Everything that the request allows is masked, so that no token can be drawn for it."""

    reason = "NO_TOKEN_LEFT"
    code = 9  # FAILED_PRECONDITION
