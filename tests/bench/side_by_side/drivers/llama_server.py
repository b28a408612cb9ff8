"""Drives llama.cpp's server, which the xllamacpp wheel holds as a library: one thread per request, streamed answers.

Run by the interpreter of its own environment, with the GGUF file as argument.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

from side_by_side.drivers.protocol import (
    Answer,
    Facts,
    Request,
    UnsupportedError,
    Workload,
    reserve_stdout,
    serve,
)

_NUM_THREADS = 2
_NUM_SLOTS = 9
_CONTEXT = 6144
# A running stream waits for a whole batch of somebody else's prompt: a small one serves the arrival of prompts best.
_NUM_BATCH = 512


class Run:
    """One workload: its clock, what came of it, and the signal for requests that wait for others to get on."""

    def __init__(self, workload: Workload) -> None:
        self.answer = Answer([0.0] * len(workload.requests), [[] for _ in workload.requests])
        self._requests = workload.requests
        self._start = time.perf_counter()
        self._progress = threading.Condition()

    def note_token(self, number: int) -> None:
        with self._progress:
            self.answer.token_s[number].append(time.perf_counter() - self._start)
            self._progress.notify_all()

    def wait_for_turn(self, number: int) -> None:
        """Return when the request may be sent, and note that it is."""
        after = self._requests[number].after_tokens
        first = [
            times for times, other in zip(self.answer.token_s, self._requests, strict=True) if not other.after_tokens
        ]
        with self._progress:
            self._progress.wait_for(lambda: not after or min(map(len, first)) >= after)
            self.answer.sent_s[number] = time.perf_counter() - self._start


def run_on(server: xllamacpp.Server, workload: Workload) -> Answer:
    if workload.at_most is not None:
        raise UnsupportedError("bounds no requests under way")
    if len(workload.requests) > _NUM_SLOTS:
        raise UnsupportedError(f"has {_NUM_SLOTS} slots")
    run = Run(workload)
    with ThreadPoolExecutor(len(workload.requests)) as threads:
        futures = [
            threads.submit(_complete, server, run, number, each) for number, each in enumerate(workload.requests)
        ]
        for future in futures:
            future.result()
    for times, request in zip(run.answer.token_s, workload.requests, strict=True):
        # The last message carries no token, it says why the output ended.
        del times[request.num_tokens :]
    return run.answer


def _complete(server: xllamacpp.Server, run: Run, number: int, request: Request) -> None:
    body = {
        "prompt": list(request.prompt),
        "n_predict": request.num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }

    def on_message(_: object) -> bool:
        run.note_token(number)
        return False

    run.wait_for_turn(number)
    server.handle_completions(json.dumps(body), on_message)


def main() -> None:
    channel = reserve_stdout()
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_parallel = _NUM_SLOTS
    params.n_ctx = _CONTEXT
    params.kv_unified = True
    params.n_batch = params.n_ubatch = _NUM_BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _NUM_THREADS
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.port = 0
    server = xllamacpp.Server(params)
    configuration = f"{_NUM_THREADS} threads, {_NUM_SLOTS} slots, unified KV f16, batch {_NUM_BATCH}"
    facts = Facts(f"xllamacpp {xllamacpp.__version__}", "server", configuration, (os.getpid(),))
    serve(channel, facts, lambda workload: run_on(server, workload))
    # The library's own threads do not end with the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
