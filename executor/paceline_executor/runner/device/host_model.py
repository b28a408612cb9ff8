"""A model of a CPU as one of a device: its logits come with its forward pass. Refuses to know which model."""

import torch

from paceline_executor.models.interface import ForwardInputs, KvCache, LanguageModel
from paceline_executor.profiling.host_trace import HostProfiler
from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden, PhaseTime


class HostModel:
    """See DeviceModel. What it hands on as hidden states of the tokens that draws need are their logits."""

    weight_bytes = 0  # its phases tell what they read
    windows = ()

    def __init__(self, model: LanguageModel, vocab_size: int, profiler: HostProfiler) -> None:
        self.vocabulary = model.vocabulary
        self._model = model
        self._vocab_size = vocab_size
        self._profiler = profiler

    def hidden(self, inputs: ForwardInputs, kv_cache: KvCache, aux: AuxHidden | None = None) -> torch.Tensor:
        if not inputs.token_ids.shape[0]:  # all rows have ended
            return torch.empty(0, self._vocab_size)
        times: list[PhaseTime] | None = [] if self._profiler.is_on else None
        logits = self._model.forward(inputs, kv_cache, aux=aux, times=times)
        if times and self._profiler.is_on:  # the profile may have ended meanwhile
            for phase in times:
                self._profiler.add_kernel(phase.phase, phase.layer, phase.start_ns, phase.end_ns, phase.num_bytes)
        return logits

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:  # noqa: ARG002
        return hidden
