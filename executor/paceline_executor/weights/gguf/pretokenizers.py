"""How byte-level BPE vocabularies cut text before merging, by the names GGUF files use in `tokenizer.ggml.pre`.

llama.cpp's `llama-vocab.cpp` defines the names. An expression splits every piece the one before it left.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from paceline.plan.split_patterns import DIGIT, DIGITS, GPT2, LLAMA3, PUNCTUATION, QWEN2, TEKKEN, THREE_DIGITS


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """With the two habits that llama.cpp ties to its name."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is itself a token is taken whole
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Ends with the bytes-to-letters mapping."""
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*steps, byte_level])


_LLAMA3_KIND = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_KIND = PreTokenizer((QWEN2,))
_DIGITS_KIND = PreTokenizer((DIGIT, GPT2))

PRE_TOKENIZERS = {
    "default": PreTokenizer((PUNCTUATION, GPT2, DIGITS, THREE_DIGITS)),
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
}
