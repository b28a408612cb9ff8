"""What an executor says before it ends."""

import json

import pytest
import structlog

from paceline_executor import __main__ as program
from paceline_executor.errors import DeviceError


@pytest.fixture(autouse=True)
def _restored_logs():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_why_an_executor_that_worked_has_ended_is_in_its_log(capfd, monkeypatch):
    async def fail(_):
        raise DeviceError("steps fail")

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr("paceline_executor.process.run", fail)
    monkeypatch.setattr(program, "end_quietly_on_signals", lambda: None)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(SystemExit) as ended:
        program.main(["--model", "any"])

    printed = capfd.readouterr()
    (line,) = printed.out.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["reason"]) == ("failed", "error", "steps fail")
    assert printed.err == "paceline-executor: error: steps fail\n"
    assert ended.value.code == program.ExitCode.FAILED
