"""Processes are started, watched, started again and ended, with small scripts in the place of services."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline_cli.supervisor.events import (
    BecameReady,
    Exited,
    Printed,
    Program,
    Progressed,
    Said,
    Started,
    TookOver,
)
from paceline_cli.supervisor.log_files import LogFiles
from paceline_cli.supervisor.supervisor import ChildFailedError, Restarts, Supervisor

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


class Recorder:
    """Keeps every event."""

    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of(self, kind, name="child"):
        """The events of a kind about one program."""
        return [event for event in self.events if isinstance(event, kind) and event.name == name]


@pytest.fixture
def recorder():
    return Recorder()


def program(*arguments, name="child", stop_stage=0):
    return Program(name, (sys.executable, "-I", "-S", FAKE_CHILD, *map(str, arguments)), stop_stage=stop_stage)


def supervise(recorder, *programs, restarts=Restarts.ALWAYS, grace_seconds=20.0):
    return Supervisor(programs, recorder, restarts=restarts, grace_seconds=grace_seconds)


def is_alive(process_id):
    """Whether a process runs; one that is dead and waits to be noticed does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def process_ids(recorder):
    """The ids that the fake children printed with their ready lines."""
    printed = [event.line for event in recorder.events if isinstance(event, Printed)]
    return [json.loads(line)["pid"] for line in printed if b'"ready"' in line]


async def test_children_come_up_and_go_down_in_order(recorder):
    """Progress is told, ready is waited for, and all end with exit code 0 and without a restart."""
    async with supervise(recorder, program("serve", name="first"), program("serve", name="second")) as supervisor:
        await supervisor.ready()
        ids = process_ids(recorder)
        assert [is_alive(number) for number in ids] == [True, True]
    for name in ("first", "second"):
        assert recorder.of(Progressed, name) == [Progressed(name, "loading the model (weights)", 0.5)]
        assert recorder.of(BecameReady, name) == [BecameReady(name)]
        assert recorder.of(Exited, name) == []
    assert [is_alive(number) for number in ids] == [False, False]


async def test_a_ready_child_that_is_killed_comes_back(recorder):
    """At once, as a new process."""
    async with supervise(recorder, program("serve")) as supervisor:
        await supervisor.ready()
        os.kill(process_ids(recorder)[0], signal.SIGKILL)
        await supervisor.during(until(lambda: len(recorder.of(BecameReady)) == 2))
    assert recorder.of(Exited) == [Exited("child", -signal.SIGKILL, None, 0.0)]
    first, second = process_ids(recorder)
    assert first != second


async def test_the_process_of_a_program_can_be_asked_for(recorder):
    failing = dataclasses.replace(program("exit", 1, name="failing"), min_restart_seconds=60.0)
    async with supervise(recorder, program("serve"), failing) as supervisor:
        await supervisor.during(until(lambda: recorder.of(BecameReady) and recorder.of(Exited, "failing")))
        assert supervisor.process_id("child") == process_ids(recorder)[0]
        assert supervisor.process_id("failing") is None
    assert supervisor.process_id("child") is None


async def test_programs_end_stage_by_stage(recorder):
    """One of a later stage is asked to end only when all of the earlier ones have ended."""
    programs = [program("slow-end", name=name, stop_stage=stage) for name, stage in (("b", 1), ("a", 0), ("c", 0))]
    async with supervise(recorder, *programs) as supervisor:
        await supervisor.ready()
    ends = [(event.name, event.text) for event in recorder.events if isinstance(event, Said)]
    assert {text for _, text in ends} == {"ending", "ended"}
    assert sorted(name for name, _ in ends[:4]) == ["a", "a", "c", "c"]
    assert [name for name, _ in ends[4:]] == ["b", "b"]


async def test_a_standby_that_takes_over_says_so(recorder):
    async with supervise(recorder, program("standby")) as supervisor:
        await supervisor.during(until(lambda: recorder.of(TookOver)))
    assert recorder.of(BecameReady) == [BecameReady("child", stands_by=True)]
    assert recorder.of(Progressed) == []


async def test_a_child_that_fails_to_start_is_tried_again_with_growing_pauses(recorder, tmp_path):
    """Until it works; a crash after that costs no pause, and the same crash again does."""
    flaky = program("flaky", tmp_path / "starts", "crash", "crash", "ready-crash", "ready-crash", "serve")
    async with supervise(recorder, flaky) as supervisor:
        await supervisor.during(until(lambda: len(recorder.of(BecameReady)) == 3))
    assert [event.restart_in_seconds for event in recorder.of(Exited)] == pytest.approx([0.1, 0.2, 0.0, 0.1])


async def test_a_child_that_can_never_work_ends_everything(recorder):
    hopeless = program("exit", 3, "paceline-executor: error: there is no model 'x'", name="executor")
    with pytest.raises(ChildFailedError, match="executor ended with exit code 3: there is no model 'x'") as caught:
        async with supervise(recorder, program("serve", name="scheduler"), hopeless) as supervisor:
            await supervisor.ready()
    assert caught.value.exit_code == 3
    assert recorder.of(Said, "executor") == []
    assert len(recorder.of(Started, "executor")) == 1
    assert not any(is_alive(number) for number in process_ids(recorder))


async def test_without_restarts_any_end_is_a_failure(recorder):
    async with supervise(recorder, program("serve"), restarts=Restarts.NEVER) as supervisor:
        await supervisor.ready()
        os.kill(process_ids(recorder)[0], signal.SIGKILL)
        with pytest.raises(ChildFailedError, match="killed by signal 9"):
            await supervisor.forever()


async def test_a_program_that_is_not_there():
    with pytest.raises(ChildFailedError, match=r"cannot run /no/such/program: No such file"):
        async with supervise(Recorder(), Program("child", ("/no/such/program",)), restarts=Restarts.NEVER) as both:
            await both.ready()


async def test_a_child_that_does_not_end_is_killed(recorder):
    async with supervise(recorder, program("stubborn"), program("serve", name="other"), grace_seconds=0.3) as both:
        await both.ready()
    assert not any(is_alive(number) for number in process_ids(recorder))


async def test_killing_does_not_wait(recorder):
    async with supervise(recorder, program("stubborn"), grace_seconds=600) as supervisor:
        await supervisor.ready()
        supervisor.kill()
    assert not any(is_alive(number) for number in process_ids(recorder))


async def test_stopping_before_anything_is_ready():
    for pause in (0.0, 0.05):
        recorder = Recorder()
        async with supervise(recorder, program("stubborn"), grace_seconds=0.2):
            await asyncio.sleep(pause)
        assert not any(is_alive(number) for number in process_ids(recorder))


async def test_what_a_child_started_ends_with_it(recorder):
    async with supervise(recorder, program("parent")) as supervisor:
        await supervisor.ready()
        grandchild = int(recorder.of(Said)[0].text.removeprefix("child: "))
        assert is_alive(grandchild)
    await until(lambda: not is_alive(grandchild))


def test_the_death_of_the_supervisor_kills_the_children():
    """Even SIGKILL leaves no orphan."""
    code = f"""
        import asyncio, sys
        from paceline_cli.supervisor.events import Program
        from paceline_cli.supervisor.supervisor import Restarts, Supervisor

        class Echo:
            def on_event(self, event):
                print(getattr(event, "line", b"").decode(), flush=True)

        async def main():
            child = Program("child", (sys.executable, "-I", "-S", {FAKE_CHILD!r}, "stubborn"))
            async with Supervisor([child], Echo(), restarts=Restarts.ALWAYS, grace_seconds=5) as supervisor:
                await supervisor.forever()

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
        lines = (line for line in process.stdout if b"ready" in line)
        child_id = int(next(lines).split(b'"pid": ')[1].split(b"}")[0])
        assert is_alive(child_id)
        process.kill()
    asyncio.run(until(lambda: not is_alive(child_id)))


async def test_log_files_hold_what_was_printed(tmp_path):
    warnings = []
    files = LogFiles(tmp_path / "logs", warn=warnings.append)
    async with supervise(files, program("serve")) as supervisor:
        await supervisor.ready()
    events = [line.split('"')[3] for line in (tmp_path / "logs" / "child.log").read_text().splitlines()]
    assert events == ["model_load", "ready"]
    assert warnings == []


def test_log_files_are_bounded(tmp_path):
    files = LogFiles(tmp_path, warn=pytest.fail, max_file_bytes=10)
    for line in (b"1234", b"5678", b"90", b"ab"):
        files.on_event(Printed("child", line))
    assert (tmp_path / "child.log.1").read_bytes() == b"1234\n5678\n"
    assert (tmp_path / "child.log").read_bytes() == b"90\nab\n"


@pytest.mark.parametrize("folder", ["file", "."], ids=["no folder", "a FIFO in it"])
def test_a_log_that_cannot_be_written_is_one_warning(tmp_path, folder):
    warnings = []
    (tmp_path / "file").write_text("not a folder")
    os.mkfifo(tmp_path / "child.log")
    files = LogFiles(tmp_path / folder, warn=warnings.append)
    for _ in range(3):
        files.on_event(Printed("child", b"x"))
    assert len(warnings) == 1
    assert "going on without" in warnings[0]
