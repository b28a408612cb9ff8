"""A tiny random model that calls tools where they are required: a grammar holds it to its chat template's calls."""

import json
from pathlib import Path

import torch
import transformers

from edge_rig.tokenizers import byte_level_tokenizer
from part_rig import CHAT_TEMPLATES

_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def write_calling_model(folder: Path, chat_template: str = "Qwen-Qwen3-0.6B") -> Path:
    """As Hugging Face transformers has models. `chat_template` is one of `CHAT_TEMPLATES`. Returns the folder."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(list(_MARKS))
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=end,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATES[chat_template], "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
