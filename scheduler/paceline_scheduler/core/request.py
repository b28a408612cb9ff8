"""A request as the core sees it: validated, resolved, token ids only.

Knows nothing of text, templates or messages; what a successor of this scheduler needs of them travels unread in
`origin`.
"""

from dataclasses import dataclass

from paceline.plan.hashes import HASH_START
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import Int32Array, RecordId


@dataclass(frozen=True, slots=True, eq=False)
class ResumePoint:
    """What a client already holds of a request's output.

    `resume_hash` is the rolling hash of the first `resume_from` tokens, `last_attempt` the highest seen;
    `prior_output_token_ids` are these tokens, None if not sent.
    """

    resume_from: int
    resume_hash: int
    last_attempt: int = 0
    prior_output_token_ids: Int32Array | None = None  # [resume_from]


NOTHING_HELD = ResumePoint(0, HASH_START)

MAX_OUTAGE_S = 60.0
"""A request that does not say waits for so long where no executor of its model is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Fixed when it is submitted.

    `handle` is the edge's own number and comes back in every output; below 0 it is the core's own, of a request that
    nobody listens to yet. `num_completions` share the key but for its index. `priority`: lower runs earlier.
    `max_tokens` None means as many as context and pool allow. Before `min_tokens` output tokens neither `end_token_ids`
    are drawn nor `ignored_end_token_ids`, those of the model that do not end this request. `bad_words` are the token
    ids of each way to spell one. `max_num_draft_tokens` bounds the drafts of a step, None for as many as are worth
    while. `deadline_s` is on the injected monotonic clock. Until it was begun it waits for `max_outage_s` at a time
    while no executor is there for it.

    `structured` is a message, the form of its output; empty: any. Executors that hold outputs to none do not run it.
    `output_format` names what its output is cut into parts by; empty: it is not.

    `is_resumable`: it goes on for a while without a listener. `attachment` is the client's number for this listener,
    `waited_s` the time since the first submission. `origin` is the request as sent without its prompt; `body_digest`
    the BLAKE2b-128 digest of all of it but what changes from one attachment to the next.
    """

    handle: int
    key: RecordId
    model: str
    prompt_token_ids: Int32Array  # [num_prompt_tokens], at least one
    sampling: SamplingParams
    end_token_ids: tuple[int, ...]
    max_tokens: int | None = None
    num_logprobs: int | None = None
    min_tokens: int = 0
    ignored_end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int | None = None
    deadline_s: float | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    priority: int = 0
    num_completions: int = 1
    max_num_draft_tokens: int | None = None
    is_resumable: bool = False
    attachment: int = 1
    waited_s: float = 0.0
    point: ResumePoint = NOTHING_HELD
    origin: bytes = b""
    body_digest: bytes = b""
    trace_parent: str = ""
    structured: bytes = b""
    output_format: str = ""
    max_outage_s: float = MAX_OUTAGE_S

    def is_of(self, body_digest: bytes, model: str) -> bool:
        return (self.body_digest, self.model) == (body_digest, model)
