"""The executor's errors: one tree, mapped once to gRPC status by the service.

    ExecutorError
        ModelError
            ModelNotFoundError
            ModelCorruptError
            UnsupportedModelError
            NotComparableError
            ModelFetchError
                HubUnreachableError
        StartError
            ShortMemoryError
            LimitError
                DrafterError
            MissingDeviceError
            StepTimesError
            ProbeTextError
        DeviceError
            DeviceFaultError
        ServiceError
            NotReadyError
            DrainingError
            ProfileRunningError
            NoStepsError
            MalformedMessageError
            NotAllowedError
            AttachError
            ProtocolError
            TermSupersededError
            TooManySchedulersError
            EpochEndedError
            StepWedgedError
            StaleEpochError
            PlanOrderError
            TooManyPlansError
            PlanError
            UnsupportedPlanError
            StepFailedError
        RequestError
            InvalidFieldError
            UnsupportedFieldError
            NumericError

Knows sentences only. Every message names what was wrong and what to do about it, in one line.
"""

import enum
from collections.abc import Mapping

DEVICE_FAILED = "the device failed while it computed a step, so this executor ends; its log says more"


class ExecutorError(Exception):
    """Raised on purpose; `str(error)` is one sentence fit for a user."""


class ModelError(ExecutorError):
    """The model given to the executor cannot be served."""


class ModelNotFoundError(ModelError):
    """There is no such file or folder, and no known model of this name."""


class ModelCorruptError(ModelError):
    """Its files are damaged, truncated or inconsistent."""


class UnsupportedModelError(ModelError):
    """Its files are sound, but name a feature that this version does not run."""


class NotComparableError(ModelError):
    """It has other tokens or another chat template than what it is validated against, or its logits are no numbers."""


class ModelFetchError(ModelError):
    """It could not be downloaded, verified or stored."""


class HubUnreachableError(ModelFetchError):
    """The hub gave no usable answer; what the cache holds may do instead."""


class StartError(ExecutorError):
    """This configuration cannot start on this machine."""


class ShortMemoryError(StartError):
    """Weights and KV cache do not fit into memory."""


class LimitError(StartError):
    """The model or the device does not allow it."""


class DrafterError(LimitError):
    """It has other tokens than the model, or would be no faster."""


class MissingDeviceError(StartError):
    """There is no GPU, none that is new enough, or nothing to compile for it."""


class StepTimesError(StartError):
    """The file cannot be read, or is no table of step times."""


class ProbeTextError(StartError):
    """The file cannot be read, or has no text to validate with."""


class DeviceError(ExecutorError):
    """Steps fail whatever is in them: the process ends."""


class DeviceFaultError(DeviceError):
    """The device failed while it computed: nothing that it holds can be trusted or taken back."""


class ServiceError(ExecutorError):
    """It ends a call or a plan stream. `reason` and `metadata` travel to the caller beside the sentence."""

    reason = "INTERNAL"

    def __init__(self, sentence: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.metadata = dict(metadata or {})


class NotReadyError(ServiceError):
    """The model is not loaded yet, or cannot be."""

    reason = "LOADING"


class DrainingError(ServiceError):
    """The executor is going away."""

    reason = "DRAINING"


class ProfileRunningError(ServiceError):
    """One profile is recorded at a time, and one is."""

    reason = "PROFILE_RUNNING"


class NoStepsError(ServiceError):
    """No step ran while a profile was recorded; there is nothing to show."""

    reason = "NO_STEPS"


class MalformedMessageError(ServiceError):
    """The bytes are no message of the call's type."""

    reason = "MALFORMED_MESSAGE"


class NotAllowedError(ServiceError):
    """The caller's certificate does not allow this call."""

    reason = "NOT_ALLOWED"


class AttachError(ServiceError):
    """The stream has no valid hello, or a message comes at the wrong time."""

    reason = "ATTACH_MALFORMED"


class ProtocolError(ServiceError):
    """There is no protocol version in common."""

    reason = "PROTOCOL_MISMATCH"


class TermSupersededError(ServiceError):
    """A scheduler of a higher (term, scheduler_id) holds the executor, or held it last."""

    reason = "TERM_SUPERSEDED"


class TooManySchedulersError(ServiceError):
    reason = "TOO_MANY_SCHEDULERS"


class EpochEndedError(ServiceError):
    """A newer Attach was accepted."""

    reason = "EPOCH_ENDED"


class StepWedgedError(ServiceError):
    """The running step does not end within its bound: there is no boundary to take over at."""

    reason = "STEP_WEDGED"


class StaleEpochError(ServiceError):
    """The plan's incarnation or epoch is not the stream's."""

    reason = "STALE_EPOCH"


class PlanOrderError(ServiceError):
    """The plan's step_id is not the next one."""

    reason = "PLAN_OUT_OF_ORDER"


class TooManyPlansError(ServiceError):
    """More plans are unanswered than the welcome allows."""

    reason = "TOO_MANY_PLANS"


class PlanFault(enum.StrEnum):
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
    """It changed nothing, and its stream ends."""

    def __init__(self, fault: PlanFault, sentence: str) -> None:
        super().__init__(sentence)
        self.fault = fault
        self.reason = f"PLAN_{fault.value}"


class UnsupportedPlanError(ServiceError):
    """`metadata` names a field that this version does not act on."""

    reason = "UNSUPPORTED_FIELD"


class StepFailedError(ServiceError):
    """No row advanced, and the stream ends."""

    reason = "STEP_FAILED"


class RequestError(ExecutorError):
    """Others of its step go on. `field` names the field at fault, if one is."""

    reason = "INTERNAL"
    code = 13  # of google.rpc.Code, as below: INTERNAL

    def __init__(self, sentence: str, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class InvalidFieldError(RequestError):
    reason = "INVALID_FIELD"
    code = 3  # INVALID_ARGUMENT


class UnsupportedFieldError(RequestError):
    """This version does not honour the field."""

    reason = "UNSUPPORTED_FIELD"
    code = 12  # UNIMPLEMENTED


class NumericError(RequestError):
    """The model produced no usable number, such as NaN logits."""

    reason = "NUMERIC_FAULT"


class NoTokenLeftError(RequestError):
    """Everything that the request allows is masked."""

    reason = "NO_TOKEN_LEFT"
    code = 9  # FAILED_PRECONDITION
