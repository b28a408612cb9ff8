"""The bounds that rows keep to, and sizes."""

from dataclasses import dataclass

from paceline.plan.values import RowState

MAX_END_TOKENS = 128
MAX_CONTEXT_BYTES = 512 * 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 768
MAX_BAD_WORD_TOKENS = 8192  # of all together
MAX_NAME_BYTES = 128
MAX_VERIFIED_TOKENS = 256  # of a step
_NUM_PARAMETERS = 32  # of a row: sampling, lengths, whether it has ended; generously


@dataclass(frozen=True, slots=True)
class RowLimits:
    num_rows: int
    max_model_len: int  # tokens of a row, prompt and output together
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_draft_tokens: int = 0  # of a row and step; 0: rows are not drafted for
    max_record_bytes: int = 64 * 1024 * 1024
    record_keep_ns: int = 60_000_000_000  # after the finish

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_draws(self) -> int:
        return most_draws(self.num_rows, self.max_num_draft_tokens)

    @property
    def device_row_bytes(self) -> int:
        """At most, for a device's memory."""
        rules = MAX_ALLOWED_TOKENS + 2 * MAX_LOGIT_BIASES + MAX_BAD_WORDS + MAX_BAD_WORD_TOKENS
        return 4 * (self.max_model_len + self.max_blocks_per_row + MAX_END_TOKENS + _NUM_PARAMETERS + rules)


def sampling_bytes(state: RowState) -> int:
    """Returns an upper bound."""
    if state.sampling is None:
        return 0
    return 64 + 12 * len(state.sampling.logit_bias) + 5 * len(state.sampling.allowed_token_ids)


def most_draws(num_rows: int, max_num_drafts: int) -> int:
    """Of a step, drafts included."""
    return max(num_rows, MAX_VERIFIED_TOKENS if max_num_drafts else 0)
