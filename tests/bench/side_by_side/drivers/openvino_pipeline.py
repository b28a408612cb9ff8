"""Drives OpenVINO GenAI by its ContinuousBatchingPipeline, which reads the GGUF file given as argument."""

import os
import sys
from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai

from side_by_side.drivers.protocol import Answer, Facts, Request, Workload, reserve_stdout, run_steps, serve

_CACHE_GIB = 1


class PipelineEngine:
    """The pipeline, step by step."""

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, openvino_genai.GenerationHandle] = {}
        self._next_id = 0

    def add(self, number: int, request: Request) -> None:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = request.num_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        token_ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(self._next_id, token_ids, generation)
        self._next_id += 1

    def step(self) -> Iterator[tuple[int, int]]:
        """One step; whoever has got tokens is reported."""
        self._pipeline.step()
        for number, handle in self._handles.items():
            if handle.can_read():
                yield number, sum(len(output.generated_ids) for output in handle.read().values())


def main() -> None:
    channel = reserve_stdout()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {})

    def run(workload: Workload) -> Answer:
        return run_steps(PipelineEngine(pipeline), workload)

    configuration = f"KV cache {_CACHE_GIB} GiB, steps of at most {scheduler.max_num_batched_tokens} tokens"
    version = openvino_genai.__version__
    serve(channel, Facts(version, "continuous-batching pipeline", configuration, (os.getpid(),)), run)


if __name__ == "__main__":
    main()
