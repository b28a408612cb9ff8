"""A process is configured by few knobs: at most 26 options each."""

import string

import pytest

from repository_checks.knobs import MAX_KNOBS, kept_places, options, programs, scattered
from repository_checks.programs import run
from repository_checks.sources import ROOT

pytestmark = pytest.mark.lint

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def knobs():
    """The options of every program."""
    found = {}
    for program in programs():
        result = run(*program, "--help")
        assert result.returncode == 0, result.stdout
        found[" ".join(program)] = options(result.stdout)
    return found


def test_a_process_has_few_knobs(knobs):
    """What a value could be measured from is measured, not asked for; no program escapes the count."""
    assert {"paceline-scheduler", "paceline-executor", "paceline up", "paceline bench"} < knobs.keys()
    assert min(len(knobs[name]) for name in ("paceline-scheduler", "paceline-executor", "paceline up")) > 10
    assert {name: sorted(found) for name, found in knobs.items() if len(found) > MAX_KNOBS} == {}


def test_the_knobs_to_come_have_room(knobs):
    """With those that CONTRIBUTING.md keeps a place for there are still no more, as far as the program exists."""
    for name, found in knobs.items():
        coming, going = kept_places(CONTRIBUTING, name)
        assert len((found - going) | coming) <= MAX_KNOBS, name
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
    """27 options are one too many."""
    help_text = "".join(f"  --option-{letter}  a knob\n" for letter in (*string.ascii_lowercase, "zz"))
    assert len(options(help_text)) > MAX_KNOBS
