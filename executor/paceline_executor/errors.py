"""The executor's errors: one tree. What a status tells beside code and reason is in `link/status.py`.

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
            RankError
        ServiceError
            NotReadyError
            ExecutorDrainingError
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
            NoTokenLeftError
            StructuredFailedError

Every message names what was wrong and what to do about it, in one line.
"""

import enum
from collections.abc import Mapping

from paceline.plan.codes import Code, CodedError

DEVICE_FAILED = "the device failed while it computed a step, so this executor ends; its log says more"


class ExecutorError(CodedError):
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


class RankError(DeviceError):
    """One of several ranks did not start, has ended, stands still or has drawn something else: all of them end."""


class ServiceError(ExecutorError):
    """It ends a call or a plan stream. `reason` and `metadata` travel to the caller beside the sentence."""

    def __init__(self, sentence: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.metadata = dict(metadata or {})


class NotReadyError(ServiceError, code=Code.UNAVAILABLE, reason="LOADING"):
    """The model is not loaded yet, or cannot be."""


class ExecutorDrainingError(ServiceError, code=Code.UNAVAILABLE, reason="DRAINING"):
    """The executor is going away."""


class ProfileRunningError(ServiceError, code=Code.RESOURCE_EXHAUSTED, reason="PROFILE_RUNNING"):
    """One profile is recorded at a time, and one is."""


class NoStepsError(ServiceError, code=Code.UNAVAILABLE, reason="NO_STEPS"):
    """No step ran while a profile was recorded; there is nothing to show."""


class MalformedMessageError(ServiceError, code=Code.INVALID_ARGUMENT, reason="MALFORMED_MESSAGE"):
    """The bytes are no message of the call's type."""


class NotAllowedError(ServiceError, code=Code.PERMISSION_DENIED, reason="NOT_ALLOWED"):
    """The caller's certificate does not allow this call."""


class AttachError(ServiceError, code=Code.INVALID_ARGUMENT, reason="ATTACH_MALFORMED"):
    """The stream has no valid hello, or a message comes at the wrong time."""


class ProtocolError(ServiceError, code=Code.FAILED_PRECONDITION, reason="PROTOCOL_MISMATCH"):
    """There is no protocol version in common."""


class TermSupersededError(ServiceError, code=Code.FAILED_PRECONDITION, reason="TERM_SUPERSEDED"):
    """A scheduler of a higher (term, scheduler_id) holds the executor, or held it last."""


class TooManySchedulersError(ServiceError, code=Code.RESOURCE_EXHAUSTED, reason="TOO_MANY_SCHEDULERS"):
    pass


class EpochEndedError(ServiceError, code=Code.ABORTED, reason="EPOCH_ENDED"):
    """A newer Attach was accepted."""


class StepWedgedError(ServiceError, code=Code.UNAVAILABLE, reason="STEP_WEDGED"):
    """The running step does not end within its bound: there is no boundary to take over at."""


class StaleEpochError(ServiceError, code=Code.FAILED_PRECONDITION, reason="STALE_EPOCH"):
    """The plan's incarnation or epoch is not the stream's."""


class PlanOrderError(ServiceError, code=Code.DATA_LOSS, reason="PLAN_OUT_OF_ORDER"):
    """The plan's step_id is not the next one."""


class TooManyPlansError(ServiceError, code=Code.RESOURCE_EXHAUSTED, reason="TOO_MANY_PLANS"):
    """More plans are unanswered than the welcome allows."""


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


class PlanError(ServiceError, code=Code.INVALID_ARGUMENT):
    """It changed nothing, and its stream ends."""

    def __init__(self, fault: PlanFault, sentence: str) -> None:
        super().__init__(sentence)
        self.fault = fault
        self.reason = f"PLAN_{fault.value}"


class UnsupportedPlanError(ServiceError, code=Code.UNIMPLEMENTED, reason="UNSUPPORTED_FIELD"):
    """`metadata` names a field that this version does not act on."""


class StepFailedError(ServiceError, reason="STEP_FAILED"):
    """No row advanced, and the stream ends."""


class RequestError(ExecutorError):
    """Others of its step go on. `field` names the field at fault, if one is."""

    def __init__(self, sentence: str, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class InvalidFieldError(RequestError, code=Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
    pass


class UnsupportedFieldError(RequestError, code=Code.UNIMPLEMENTED, reason="UNSUPPORTED_FIELD"):
    """This version does not honour the field."""


class NumericError(RequestError, reason="NUMERIC_FAULT"):
    """The model produced no usable number, such as NaN logits."""


class NoTokenLeftError(RequestError, code=Code.FAILED_PRECONDITION, reason="NO_TOKEN_LEFT"):
    """Everything that the request allows is masked."""


class StructuredFailedError(RequestError, code=Code.INVALID_ARGUMENT, reason="STRUCTURED_FAILED"):
    """The form of the output takes more than a step may, here as anywhere."""
