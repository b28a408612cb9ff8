"""The help of scheduler and executor: the style of `paceline --help`, at every width, with every default."""

import os
import re
import subprocess
import sys

import pytest

from paceline.process.help import HelpParser
from paceline_executor.config import parse_config as parse_executor
from paceline_scheduler.config import parse_config as parse_scheduler

PROGRAMS = {"paceline_scheduler": parse_scheduler, "paceline_executor": parse_executor}


@pytest.fixture
def help_of(monkeypatch, capsys):
    """What `--help` of a program prints on a terminal of some width."""

    def help_of(program, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            PROGRAMS[program](["--help"])
        assert end.value.code == 0
        return capsys.readouterr().out

    return help_of


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_help_fits_the_terminal(help_of, program, columns):
    """All panels have one width: that of the terminal, as far as lines of it can be read."""
    lines = help_of(program, columns).splitlines()
    assert {len(line) for line in lines if line[:1] in ("│", "╭", "╰")} == {min(columns, 120)}
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_option_is_told_in_a_sentence_with_its_default(help_of, program):
    text = help_of(program, 120)
    titles = re.findall(r"^╭─ (.+?) ─+╮$", text, flags=re.MULTILINE)
    assert titles[-3:] == ["Options", "Exit codes", "Environment"]
    assert all(title[0].isupper() for title in titles)
    told = " ".join(text.replace("│", " ").split())
    options = re.findall(r"(--[a-z-]+(?:, -h)?)  +(?:[A-Z_:]+  +)?(\S.*?)(?=  +|$)", text)
    assert all(re.match(r"[A-Z]", sentence) for _, sentence in options if sentence)
    assert "(default" not in told
    assert "[default: 127.0.0.1]" in told
    assert "--shutdown-timeout SECONDS" in told


@pytest.mark.parametrize("program", PROGRAMS)
def test_where_boxes_cannot_be_written_they_are_plain(program):
    environment = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "ascii"}
    command = (sys.executable, "-m", program, "--help")
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    assert "+- Exit codes ---" in text
    assert text.isascii()


def test_a_long_word_and_a_percent_sign_are_shown_whole():
    """The text is argparse's own: `%%` is one, and a default stands where it is asked for."""
    parser = HelpParser(prog="program", description="Does it.", panels=[("Codes", [("0", "Done.")])])
    group = parser.add_argument_group("Group")
    group.add_argument("--share", default=7, metavar="N", required=True, help="100%% of it. [default: %(default)s]")
    text = parser.format_help()
    assert "--share  N  100% of it. [default: 7] [required]" in text
    assert " 0  Done." in text


def test_a_mistake_is_one_line(capsys):
    parser = HelpParser(prog="it", description="", panels=())
    with pytest.raises(SystemExit):
        parser.parse_args(["--bogus"])
    assert capsys.readouterr().err == "it: error: unrecognized arguments: --bogus\n"
