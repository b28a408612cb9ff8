"""Drives vLLM's CPU build by its LLMEngine, in one process, in the type in which it is fastest here.

That is bfloat16 where the processor has products of it, else float32.

Arguments: the GGUF file, and a folder for the same weights as a float32 Hugging Face model, which is what vLLM loads.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
import vllm
from vllm.sampling_params import RequestOutputKind

from side_by_side.drivers.protocol import Answer, Facts, Request, Workload, reserve_stdout, run_steps, serve

_MAX_MODEL_LEN = 2560
_MAX_BATCHED_TOKENS = 2048
_MAX_REQUESTS = 64


class LibraryEngine:
    """The engine, step by step."""

    def __init__(self, engine: vllm.LLMEngine) -> None:
        self._engine = engine

    def add(self, number: int, request: Request) -> None:
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=request.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, sampling)

    def step(self) -> Iterator[tuple[int, int]]:
        """One step; whoever has got tokens is reported."""
        for output in self._engine.step():
            yield int(output.request_id), len(output.outputs[0].token_ids)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as a float32 Hugging Face model."""
    if (folder / "config.json").exists():
        return
    unfinished = folder.with_suffix(".unfinished")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent),
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(unfinished)
    unfinished.rename(folder)


def fastest_type(processor: str) -> str:
    """The type to compute in, by what /proc/cpuinfo says of the processor."""
    return "bfloat16" if "avx512_bf16" in processor.split() else "float32"


def main() -> None:
    channel = reserve_stdout()
    gguf_file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    convert(gguf_file, folder)
    kind = fastest_type(Path("/proc/cpuinfo").read_text())
    arguments = vllm.EngineArgs(
        model=str(folder),
        dtype=kind,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=_MAX_REQUESTS,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)

    def run(workload: Workload) -> Answer:
        return run_steps(LibraryEngine(engine), workload)

    configuration = f"{kind}, steps of at most {_MAX_BATCHED_TOKENS} tokens, engine in the caller's process"
    serve(channel, Facts(vllm.__version__, "LLMEngine", configuration, (os.getpid(),)), run)


if __name__ == "__main__":
    main()
