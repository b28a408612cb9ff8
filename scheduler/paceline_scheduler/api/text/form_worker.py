"""The process that checks forms of outputs: `python -m paceline_scheduler.api.text.form_worker`.

A form of fifty bytes can cost its compiler seconds and memory. The process is set up with {max_cpu_s}, asked with a
serialised StructuredOutput, and answers {} or why it is refused: {reason, field, sentence}.
"""

import signal
from typing import Any

from paceline.forms.compiling import check_form
from paceline.forms.errors import FormError, Reason
from paceline.v1 import sampling_pb2
from paceline_scheduler.api.text.confined_worker import Message, Work, printable, serve


def _set_up(setup: dict[str, Any], _: bytes) -> Work:
    # Of the processor, not of the clock: what is refused is refused on a busy machine and on an idle one.
    def work(_: dict[str, Any], data: bytes) -> Message:
        signal.setitimer(signal.ITIMER_PROF, setup["max_cpu_s"])
        answer = _check(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return answer, b""

    return work


def _check(data: bytes) -> dict[str, str]:
    try:
        check_form(sampling_pb2.StructuredOutput.FromString(data))
    except FormError as error:
        return {"reason": error.reason, "field": error.field, "sentence": printable(error.sentence)}
    except MemoryError:
        return {"reason": Reason.TOO_COMPLEX, "field": "structured", "sentence": "needs too much memory"}
    return {}


if __name__ == "__main__":
    serve(_set_up)
