"""The edge's usual model. Apart from `tokenizers`: importing this trains its tokenizer."""

from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
MODEL = served_model(tokenizer_source(TOKENIZER, eos_token="<|im_end|>"))
LONG_MODEL = served_model(MODEL.tokenizer, max_model_len=4096)


def encode(text: str) -> list[int]:
    """The tokens of a text."""
    token_ids: list[int] = TOKENIZER.encode(text).ids
    return token_ids
