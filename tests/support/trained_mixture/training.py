"""How the mixture is trained: with transformers, in a few minutes of two cores.

`PYTHONPATH=tests/support .venv/bin/python -m trained_mixture.training FOLDER` made the files of the folder beside.
"""

import math
import sys
from pathlib import Path

import torch
import transformers
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from paceline.bytes_tokenizer import CHAT_TEMPLATE, END_TOKEN_IDS, VOCAB_SIZE, make_bytes_tokenizer
from trained_mixture import tokens_of_text

NUM_STEPS, WARM_UP, BATCH, CONTEXT = 350, 40, 24, 128
LEARNING_RATE = 4e-3
# Of a router's squared logits: with small ones a token's experts have weights of one size, and each counts.
LOGIT_PENALTY = 0.01
CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    output_router_logits=True,  # so that the loss counts how unevenly experts are chosen
    router_aux_loss_coef=0.02,
    eos_token_id=list(END_TOKEN_IDS),
)


def train(num_steps: int) -> transformers.PreTrainedModel:
    """The same each time on one machine."""
    torch.manual_seed(0)
    ALL_EXPERTS_FUNCTIONS.register("dense", _all_experts)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG, experts_implementation="dense")
    text = torch.tensor(tokens_of_text()[0])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(num_steps):
        cosine = (1 + math.cos(math.pi * step / num_steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.98 * cosine + 0.02)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        windows = text[starts + torch.arange(CONTEXT)]
        optimizer.zero_grad()
        found = model(windows, labels=windows, use_cache=False)
        (found.loss + LOGIT_PENALTY * sum(logits.square().mean() for logits in found.router_logits)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _all_experts(
    experts: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each token goes through every expert, times 0 where it was not chosen: faster than to sort tokens by experts."""
    shares = torch.zeros(len(hidden), experts.num_experts).scatter(1, chosen, weights)
    gates, ups = torch.matmul(hidden, experts.gate_up_proj.mT).chunk(2, dim=-1)
    return torch.matmul(functional.silu(gates) * ups * shares.T[:, :, None], experts.down_proj.mT).sum(0)


def save(model: transformers.PreTrainedModel, folder: Path) -> None:
    """In float16, with the tokenizer."""
    model.half().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(make_bytes_tokenizer())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    save(train(NUM_STEPS), Path(sys.argv[1]))
