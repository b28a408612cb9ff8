"""All that turning text into token ids and back needs, in one value that can be sent to another process."""

from dataclasses import dataclass

from paceline.plan.sampling import GenerationDefaults

# With these chat models end a turn, a message or a document. A model may emit any of several (SmolLM2: <|im_end|> after
# a turn, <|endoftext|> after a document), and its file names only one as "eos".
END_TOKEN_TEXTS = frozenset(
    {
        "</s>",
        "<EOT>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's token is spelt with these letters)
    }
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Each within the vocabulary; None where the model has none."""

    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: tuple[int, ...]  # any of them ends a generation; eos first, no id twice
    prefix_token_ids: tuple[int, ...] = ()  # stand before a plain-text prompt; a chat template has its own
    suffix_token_ids: tuple[int, ...] = ()  # stand behind it
    names: tuple[tuple[str, str], ...] = ()  # what templates call them, and their texts


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Encode with `add_special_tokens=False` and put prefix and suffix around: a post-processor inside `tokenizer_json`
    is not to be relied on. Texts of special tokens, such as <|im_start|>, encode to their single ids.
    """

    tokenizer_json: bytes  # as the tokenizers library serialises itself
    chat_template: str | None  # jinja2 source, untrusted
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...]
    suffix_token_ids: tuple[int, ...]
    special_tokens: tuple[tuple[str, str], ...]
    defaults: GenerationDefaults
    default_system_text: str | None = None  # of a chat without a system message; None: its template decides
    response_template: str | None = None  # how outputs are marked, in JSON, untrusted
    tool_use_template: str | None = None  # of chats with tools; None: as of others


def make_bundle(
    tokenizer_json: bytes,
    chat_template: str | None,
    special: SpecialTokens,
    defaults: GenerationDefaults,
    tool_use_template: str | None = None,
) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token_id=special.bos_token_id,
        eos_token_id=special.eos_token_id,
        end_token_ids=special.end_token_ids,
        prefix_token_ids=special.prefix_token_ids,
        suffix_token_ids=special.suffix_token_ids,
        special_tokens=special.names,
        defaults=defaults,
        tool_use_template=tool_use_template,
    )
