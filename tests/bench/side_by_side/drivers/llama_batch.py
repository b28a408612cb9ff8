"""Drives llama.cpp by its low-level batch API: whole prompts first, then one `llama_decode` per step for all rows.

Run by the interpreter of its own environment, with the GGUF file as argument. A context is made to measure for every
workload, outside the time that is measured: a row has its own part of the KV cache (f16), as long as it needs.
"""

import ctypes
import os
import sys
from collections.abc import Iterator

import llama_cpp
import numpy as np

from side_by_side.drivers.protocol import (
    Answer,
    Facts,
    Request,
    UnsupportedError,
    Workload,
    reserve_stdout,
    run_steps,
    serve,
)

_NUM_THREADS = 2
_NUM_BATCH = 2048
_NUM_MICRO_BATCH = 512


class BatchEngine:
    """Prompts that wait are computed before anything is decoded, as many together as fit a batch."""

    def __init__(self, model: ctypes.c_void_p, workload: Workload) -> None:
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._context = llama_cpp.llama_init_from_model(model, _context_params(workload))
        self._batch = llama_cpp.llama_batch_init(_NUM_BATCH, 0, 1)
        self._prompts: dict[int, Request] = {}
        # Of each row that decodes: its last token, the position that token goes to, and how many are still to come.
        self._rows: dict[int, tuple[int, int, int]] = {}

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def add(self, number: int, request: Request) -> None:
        self._prompts[number] = request

    def step(self) -> Iterator[tuple[int, int]]:
        """Compute prompts while there are any, else one token of every row."""
        self._batch.n_tokens = 0
        outputs = self._put_prompts() if self._prompts else self._put_rows()
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode found no room")
        for index, number, position, num_left in outputs:
            logits = llama_cpp.llama_get_logits_ith(self._context, index)
            token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            if num_left:
                self._rows[number] = (token, position, num_left)
            yield number, 1

    def _put_prompts(self) -> list[tuple[int, int, int, int]]:
        outputs = []
        while self._prompts:
            number, request = next(iter(self._prompts.items()))
            length = len(request.prompt)
            if self._batch.n_tokens + length > _NUM_BATCH:
                break
            del self._prompts[number]
            for position, token in enumerate(request.prompt):
                self._put(number, token, position, wants_logits=position == length - 1)
            outputs.append((self._batch.n_tokens - 1, number, length, request.num_tokens - 1))
        return outputs

    def _put_rows(self) -> list[tuple[int, int, int, int]]:
        outputs = []
        for number, (token, position, num_left) in self._rows.items():
            self._put(number, token, position, wants_logits=True)
            outputs.append((self._batch.n_tokens - 1, number, position + 1, num_left - 1))
        self._rows = {}
        return outputs

    def _put(self, number: int, token: int, position: int, *, wants_logits: bool) -> None:
        batch, index = self._batch, self._batch.n_tokens
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = number
        batch.logits[index] = wants_logits
        batch.n_tokens = index + 1


def _context_params(workload: Workload) -> llama_cpp.llama_context_params:
    num_rows = len(workload.requests)
    longest = max(len(request.prompt) + request.num_tokens for request in workload.requests)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = num_rows * longest
    params.n_seq_max = num_rows
    params.kv_unified = False
    params.n_batch = _NUM_BATCH
    params.n_ubatch = _NUM_MICRO_BATCH
    params.n_threads = params.n_threads_batch = _NUM_THREADS
    return params


def main() -> None:
    channel = reserve_stdout()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
    system = llama_cpp.llama_print_system_info().decode().strip(" |")

    def run(workload: Workload) -> Answer:
        if any(len(request.prompt) > _NUM_BATCH for request in workload.requests):
            raise UnsupportedError(f"takes prompts of at most {_NUM_BATCH} tokens")
        engine = BatchEngine(model, workload)
        try:
            return run_steps(engine, workload)
        finally:
            engine.close()

    configuration = f"{_NUM_THREADS} threads, KV f16, batch {_NUM_BATCH}, micro-batch {_NUM_MICRO_BATCH}; {system}"
    serve(channel, Facts(llama_cpp.__version__, "batch API", configuration, (os.getpid(),)), run)


if __name__ == "__main__":
    main()
