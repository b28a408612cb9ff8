"""The edge's bounds. They protect the process, so none is an option.

Apart, because whoever builds an edge gives it these.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """max_stream_bytes: output that may wait for a slow client, per gRPC stream, and as much again that is held for
    larger deltas. max_bytes_per_session_request: more for each completion of a session. max_session_requests:
    unfinished completions of one session. max_held_tokens: that a request's stream_interval may gather.
    max_message_bytes: output in one message; making a full one keeps everybody waiting, 60 ms with log-probabilities.
    silence_s: a client that has sent heartbeats and says nothing for so long is lost. max_chars_per_token: times the
    context, bounds prompts before they are tokenised. max_inline_chars: up to this a thread would take longer to start.
    max_num_waiting_texts: that wait for a thread, or chats for the renderer.
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

    def max_prompt_chars(self, max_model_len: int) -> int:
        return max_model_len * self.max_chars_per_token
