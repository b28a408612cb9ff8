"""A profile of a real model that answers, through the command and a scheduler's admin port."""

import subprocess

from both_sides.chrome_trace import check_steps, read_trace, steps_of
from repository_checks.programs import BIN

LAYER = {"qkv", "attention", "attention_output", "norm", "gate_up", "down"}


def test_the_kernels_of_a_real_model_are_within_their_steps(running_system, tmp_path):
    file = tmp_path / "trace.json"
    asking = [BIN / "paceline", "generate", "--target", running_system.api, "--max-tokens", "400", "--raw", "Numbers:"]
    recording = [BIN / "paceline", "profile", "--target", running_system.api, "--steps", "6", "-o", file]
    with subprocess.Popen(recording, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            subprocess.run(asking, check=True, capture_output=True)
        assert process.returncode == 0, process.stderr.read()
    events = read_trace(file.read_bytes())
    check_steps(events)
    steps = steps_of(events)
    kernels = [event for event in events if event.category == "kernel"]
    forwards = [event for event in events if event.name == "forward" and event.track == kernels[0].track]
    of_one = [kernel for kernel in kernels if kernel.is_within(forwards[1])]  # steps in flight overlap

    assert len(steps) == 6
    assert {kernel.name for kernel in kernels} == {"embed", *LAYER, "logits"}
    assert len([kernel for kernel in of_one if kernel.name == "down"]) == 30
    assert {kernel.parent.name for kernel in kernels} == {"forward"}
    # The step thread launches them, in parts of its own; the compute thread has a track.
    assert {event.parent and event.parent.name for event in events if event.name == "forward"} == {"compute", None}
    assert all(kernel.args["bytes"] > 0 for kernel in kernels if kernel.name in ("qkv", "attention", "logits"))
