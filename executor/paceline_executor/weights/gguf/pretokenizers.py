"""How byte-level BPE vocabularies cut text before merging, by the names GGUF files use in `tokenizer.ggml.pre`.

The expressions are those of llama.cpp's `llama-vocab.cpp`, which defines the names, in the spelling of the models' own
tokenizer.json files. An expression splits every piece the one before it left.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words are cut where lower case goes over into upper case.
_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_KIND = PreTokenizer((_QWEN2,))
_DIGITS_KIND = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True),
}
