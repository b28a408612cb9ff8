"""A stand-in for a service, run as a script: prints the events a service prints, and ends in the way it is told.

fake_child.py serve                 ready; ends on SIGTERM
fake_child.py stubborn              ready; ignores SIGTERM
fake_child.py slow-end              ready; takes a moment to end on SIGTERM, and tells of its beginning and its end
fake_child.py standby               ready as a standby; then it takes over; ends on SIGTERM
fake_child.py parent                ready; has a child of its own and ends at once on SIGTERM, without it
fake_child.py exit CODE WORDS...    one line on stderr, then ends
fake_child.py flaky FILE MODE...    each start takes one MODE off: "crash", "ready-crash", then "serve"
"""

import json
import os
import signal
import subprocess
import sys
import time


def log(event, **fields):
    print(json.dumps({"event": event, "level": "info", **fields}), flush=True)


def serve():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log("model_load", phase="weights", fraction=0.5)
    log("ready", pid=os.getpid())
    while True:
        time.sleep(60)


def slow_end():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    log("ready", pid=os.getpid())
    signal.sigwait([signal.SIGTERM])
    log("ending")
    time.sleep(0.1)
    log("ended")


def standby():
    log("ready", pid=os.getpid(), standby=True)
    log("waiting_in_line", address="127.0.0.1:1")
    serve()


def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log("ready", pid=os.getpid())
    while True:
        time.sleep(60)


def parent():
    left_behind = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    log("child", message=str(left_behind.pid), level="warning")
    serve()


def flaky(path, *modes):
    with open(path, "a+") as file:  # noqa: PTH123  it runs without site-packages, as light as can be
        file.seek(0)
        num_starts = len(file.read())
        file.write("x")
    mode = modes[min(num_starts, len(modes) - 1)]
    if mode == "ready-crash":
        log("ready", pid=os.getpid())
    if mode != "serve":
        sys.exit(1)
    serve()


def leave(code, *words):
    print(*words, file=sys.stderr)
    sys.exit(int(code))


if __name__ == "__main__":
    modes = {
        "serve": serve,
        "slow-end": slow_end,
        "standby": standby,
        "stubborn": stubborn,
        "parent": parent,
        "flaky": flaky,
        "exit": leave,
    }
    modes[sys.argv[1]](*sys.argv[2:])
