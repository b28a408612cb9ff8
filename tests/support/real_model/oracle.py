"""The default model as transformers computes it, with the weights and configuration that it reads from the file.

Apart from the prompts, as transformers takes seconds to import.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from paceline_executor.weights import TokenizerBundle


class Oracle:
    def __init__(self, path: Path) -> None:
        config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
        with torch.device("meta"):
            empty = LlamaForCausalLM(config)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
        self._model = LlamaForCausalLM(config).eval()
        if unexpected := self._model.load_state_dict(tensors, strict=False).unexpected_keys:
            raise ValueError(f"the file holds {unexpected}, which a Llama does not have")
        self._model.tie_weights()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Beyond the end of a turn, too."""
        ids = torch.tensor([list(prompt)])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **options)
        return [int(token) for token in generated[0, len(prompt) :]]

    @torch.no_grad()
    def undecided(self, prompt: Sequence[int], output: Sequence[int]) -> dict[int, float]:
        """At which output tokens another one would be taken, given all tokens before, and by what margin.

        That every token is the choice after the ones before it says the same as that both generate it greedily, and one
        pass over the whole text tells.
        """
        logits = self._model(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[0]
        margins = logits.max(-1).values - logits.gather(1, torch.tensor([output]).T)[:, 0]
        return {i: margin for i, margin in enumerate(margins.tolist()) if logits[i].argmax() != output[i]}

    def save(self, folder: Path, tokenizer: TokenizerBundle) -> None:
        """As Hugging Face publishes models, in bfloat16: what tools take that quantise."""
        self._model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
        names = dict(tokenizer.special_tokens)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template, **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
