"""Stand-ins for the console scripts, run as `fake_services.py scheduler|executor OPTIONS...`.

They take the options of the real ones, refuse unknown ones with exit code 2 as those do, and print the same events. The
scheduler answers every request with the same sentence; a model called "broken" makes the executor end as it would for a
missing one, one called "taken" as for a port in use, one called "crash" makes it crash. ATTACH_WHEN_THERE, in the
environment, names a file without which the scheduler serves no model. DRAIN_UNTIL_THERE names one without which it does
not end, DRAIN_EXIT_CODE its exit code, and DRAIN_REQUESTS how many requests it says to run until then.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def log(event, **fields):
    print(json.dumps({"event": event, "level": "info", **fields}), flush=True)


def wait_for_sigterm(meanwhile=lambda: None):
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    meanwhile()
    log("ready")
    while not stopping.wait(0.05):
        meanwhile()
    log("draining")


def may(variable):
    """Whether the file is there that the scheduler is to wait for, if any."""
    return variable not in os.environ or Path(os.environ[variable]).exists()


def scheduler(arguments):
    from paceline.v1 import inference_pb2 as pb
    from paceline_client.testing import FakeServer, say

    parser = argparse.ArgumentParser("paceline-scheduler")
    for name in ("executors", "host", "port", "admin-port", "health-port", "metrics-port", "shutdown-timeout"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--standby", action="store_true")
    options = parser.parse_args(arguments)
    model = pb.Model(name="fake", num_executors=len(options.executors.split(",")))
    with FakeServer(say("The capital of France is Paris."), models=[], port=int(options.port)) as server:
        wait_for_sigterm(lambda: server.set_models([model] if may("ATTACH_WHEN_THERE") else []))
    if "DRAIN_REQUESTS" in os.environ:
        log("still_running", num_requests=int(os.environ["DRAIN_REQUESTS"]))
    while not may("DRAIN_UNTIL_THERE"):
        time.sleep(0.02)
    return int(os.environ.get("DRAIN_EXIT_CODE", "0"))


def executor(arguments):
    parser = argparse.ArgumentParser("paceline-executor")
    for name in ("model", "host", "port", "health-port", "metrics-port", "shutdown-timeout"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("num-threads", "max-num-seqs", "kv-cache-memory", "kv-cache-dtype", "quantization", "revision"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args(arguments)
    if options.model == "broken":
        print("paceline-executor: error: there is no model 'broken'", file=sys.stderr)
        sys.exit(3)
    if options.model == "taken":
        print(
            "paceline-executor: error: cannot listen on 127.0.0.1:9465; choose another with --metrics-port",
            file=sys.stderr,
        )
        sys.exit(4)
    if options.model == "crash":
        raise RuntimeError("a bug")
    for event in ("model_fetch", "model_load", "warm_up"):
        log(event, fraction=1.0)
    wait_for_sigterm()
    return 0


if __name__ == "__main__":
    code = {"scheduler": scheduler, "executor": executor}[sys.argv[1]](sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)  # as the real ones do: without waiting for threads of libraries
