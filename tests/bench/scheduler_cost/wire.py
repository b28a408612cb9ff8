"""What measurements ask a scheduler, as messages.

Apart from the measurements, because only modules of this name know generated messages.
"""

from paceline.v1 import admin_pb2, inference_pb2, sampling_pb2
from paceline_scheduler.observers.steps import StepTotals

GENERATE_METHOD = "/paceline.v1.InferenceService/Generate"
LIST_EXECUTORS_METHOD = "/paceline.v1.AdminService/ListExecutors"  # its request is empty


def write_generate(text: str, n: int) -> bytes:
    """Return a client's request for so many completions."""
    return inference_pb2.GenerateRequest(text=text, sampling=sampling_pb2.SamplingParams(n=n)).SerializeToString()


def generate_request(request_id: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Return a client's request, without a prompt."""
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens)
    return inference_pb2.GenerateRequest(request_id=request_id, stopping=stopping)


def read_step_totals(data: bytes) -> StepTotals:
    """Return the sums of steps of the only executor in a ListExecutorsResponse."""
    (executor,) = admin_pb2.ListExecutorsResponse.FromString(data).executors
    steps, timings = executor.steps, executor.steps.timings
    return StepTotals(
        num_steps=steps.num_steps,
        num_rows=steps.num_rows,
        num_output_tokens=steps.num_output_tokens,
        waited_ns=timings.waited_ns,
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_ns=timings.idle_ns,
        starved_ns=steps.starved_ns,
        planning_ns=steps.planning_ns,
    )
