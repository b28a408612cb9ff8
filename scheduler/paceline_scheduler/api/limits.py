"""The edge's bounds in one place. They protect the process; none is a matter of taste, so none is an option.

Apart, because whoever builds an edge gives it these.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Bounds of the edge.

    max_stream_bytes: output that may wait for a client that reads too slowly, per gRPC stream, beside what one step
    brought; and as much again that is held because requests want larger deltas.
    max_bytes_per_session_request: what a session may hold more for each of its completions, as one step brings output
    for all of them at once.
    max_session_requests: unfinished completions of one session.
    max_held_tokens: tokens that a request's stream_interval may gather before they are sent.
    max_message_bytes: output put into one message, or that of one completion; what is more goes into the next. Making
    a message keeps everybody else waiting, 60 ms where it is full of log-probabilities.
    heartbeat_s: time between the heartbeats to a session.
    silence_s: a session whose client has begun to send heartbeats and says nothing for so long has lost it.
    max_chars_per_token: a prompt with more characters than this times the context is refused without being tokenised.
    max_inline_chars: a text up to this length is tokenised on the event loop, as a thread would take longer to start.
    num_tokenizer_threads: threads for longer texts.
    max_num_waiting_texts: texts that wait for such a thread, or chats for the renderer, before new ones are refused.
    """

    max_stream_bytes: int = 256 * 1024
    max_bytes_per_session_request: int = 512
    max_session_requests: int = 4096
    max_held_tokens: int = 1024
    max_message_bytes: int = 256 * 1024
    heartbeat_s: float = 0.5
    silence_s: float = 3.0
    max_chars_per_token: int = 16
    max_inline_chars: int = 1024
    num_tokenizer_threads: int = 2
    max_num_waiting_texts: int = 256
