"""What measurements ask a scheduler, as messages.

Apart from the measurements, because only modules of this name know generated messages.
"""

from paceline.v1 import inference_pb2, sampling_pb2


def generate_request(request_id: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Return a client's request, without a prompt."""
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens)
    return inference_pb2.GenerateRequest(request_id=request_id, stopping=stopping)
