"""A process is configured by few knobs: at most 27 options each, and a command by at most 32."""

import io
import string
import tomllib
from contextlib import redirect_stdout

import pytest
import typer.main
from typer.testing import CliRunner

from paceline_cli.app import app
from paceline_cli.options import HANDED_OPTIONS
from paceline_executor import config as executor
from paceline_gateway import config as gateway
from paceline_scheduler import config as scheduler
from repository_checks.knobs import MAX_COMMAND_KNOBS, MAX_KNOBS, kept_places, options, scattered
from repository_checks.sources import ROOT

pytestmark = pytest.mark.lint

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def knobs():
    """The options of every program that this repository installs, and of every command of `paceline`."""
    programs = {"scheduler": scheduler, "executor": executor, "gateway": gateway}
    found = {f"paceline-{name}": help_of(config.parse_config) for name, config in programs.items()}
    for name in ("", *typer.main.get_group(app).commands):
        result = CliRunner().invoke(app, [*filter(None, [name]), "--help"])
        assert result.exit_code == 0, result.output
        found[f"paceline {name}".rstrip()] = result.output
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(scripts) == {name for name in found if not name.startswith("paceline ")}
    return {name: options(text) for name, text in found.items()}


def help_of(parse_config):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # it draws boxes
    with redirect_stdout(shown), pytest.raises(SystemExit, match="0"):
        parse_config(["--help"])
    shown.seek(0)
    return shown.read()


def most_of(program):
    return MAX_COMMAND_KNOBS if " " in program else MAX_KNOBS


def test_what_a_command_hands_on_is_an_option_of_its_programs(knobs):
    for option in HANDED_OPTIONS:
        for program in ("paceline up", *(f"paceline-{name}" for name in option.of)):
            assert option.flag in knobs[program]


def test_a_process_has_few_knobs(knobs):
    assert {"paceline-scheduler", "paceline-executor", "paceline up", "paceline bench"} < knobs.keys()
    assert min(len(knobs[name]) for name in ("paceline-scheduler", "paceline-executor", "paceline up")) > 10
    assert {name: sorted(found) for name, found in knobs.items() if len(found) > most_of(name)} == {}


def test_the_knobs_to_come_have_room(knobs):
    for name, found in knobs.items():
        coming, going = kept_places(CONTRIBUTING, name)
        assert len((found - going) | coming) <= most_of(name), name
    assert kept_places(CONTRIBUTING, "paceline-scheduler")[0] > {"--tls-dir", "--tokens"}


def test_what_belongs_together_is_one_knob(knobs):
    assert {name: scattered(found) for name, found in knobs.items() if scattered(found)} == {}


def test_knobs_that_belong_together_are_found():
    assert scattered({"--tls-dir", "--port", "--speculation"}) == []
    assert scattered({"--tls-dir", "--tls-key", "--otel-endpoint"}) == ["--otel-endpoint", "--tls-dir", "--tls-key"]


def test_a_kept_place_counts_for_the_programs_it_names():
    table = "| `--new` | `a`, `paceline up` | a file, in place of `--old` |\n| `--other` | `b` | a number |\n"
    assert kept_places(table, "paceline up") == ({"--new"}, {"--old"})
    assert kept_places(table, "c") == (set(), set())


def test_an_option_counts_once_however_it_is_written():
    help_text = """
usage: server [-h] [--port PORT]

options:
  -h, --help            show this help message and exit
  --version             show the version
  -p PORT, --port PORT  where to listen, see --host
  --host HOST           the address to bind
  --enable-cache, --no-enable-cache
  --no-color            plain text
"""
    assert options(help_text) == {"--port", "--host", "--enable-cache", "--color"}


def test_too_many_options_are_counted():
    help_text = "".join(f"  --option-{letter}  a knob\n" for letter in [*string.ascii_lowercase, "zz", "zzz"])
    assert len(options(help_text)) == 28 > MAX_KNOBS
