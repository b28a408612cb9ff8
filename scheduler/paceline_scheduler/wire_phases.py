"""Phase times as messages. Apart from `api.wire` and `link.wire_contexts`, which both write them."""

from paceline.plan.durations import read_duration, write_duration
from paceline.v1.inference_pb2 import PhaseTimes as PhaseTimesMessage
from paceline_scheduler.core.phases import PhaseTimes


def write_times(times: PhaseTimes) -> PhaseTimesMessage:
    return PhaseTimesMessage(
        queued=write_duration(times.queued_s),
        prefill=write_duration(times.prefill_s),
        decode=write_duration(times.decode_s),
        preempted=write_duration(times.preempted_s),
    )


def read_times(message: PhaseTimesMessage) -> PhaseTimes:
    return PhaseTimes(*map(read_duration, (message.queued, message.prefill, message.decode, message.preempted)))
