"""Stand-ins for the services, run as `fake_chaos_services.py scheduler|executor OPTIONS...`.

The scheduler answers each request with tokens that follow from its prompt. FORGETFUL, in the environment, names a file:
a scheduler that finds it answers with other tokens, one that does not makes it.
"""

import json
import os
import signal
import sys
import threading
import zlib
from pathlib import Path

NUM_TOKENS = 200


def answer(request, salt):
    """The same tokens for the same request, for each of its completions."""
    from paceline_client.testing import End, Tokens

    first = zlib.crc32(request.text.encode()) % 1000 + salt
    for index in range(request.sampling.n or 1):
        for number in range(NUM_TOKENS):
            yield Tokens((first + index + number,), f" {number}", completion=index)
        yield End(completion=index)


def salt_of_this_start():
    """0 for a scheduler that answers as the ones before it."""
    marker = Path(os.environ.get("FORGETFUL", os.devnull))
    if marker.exists():
        return 0 if marker == Path(os.devnull) else 5000
    marker.touch()
    return 0


def scheduler(options):
    from paceline.v1 import inference_pb2 as pb
    from paceline_client.testing import FakeServer

    salt = salt_of_this_start()
    model = pb.Model(name="fake", num_executors=len(options["--executors"].split(",")))
    with FakeServer(lambda request: list(answer(request, salt)), models=[model], port=int(options["--port"])):
        run_until_sigterm()


def run_until_sigterm():
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    print(json.dumps({"event": "ready", "level": "info"}), flush=True)
    stopping.wait()


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "scheduler":
        scheduler(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    else:
        run_until_sigterm()
    sys.stdout.flush()
    os._exit(0)
