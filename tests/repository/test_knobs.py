"""A process is configured by few knobs: at most 25 options each."""

import string

import pytest

from repository_checks.knobs import MAX_KNOBS, options
from repository_checks.programs import run

pytestmark = pytest.mark.lint


@pytest.mark.parametrize("program", ["paceline-scheduler", "paceline-executor"])
def test_a_process_has_few_knobs(program):
    """What a value could be measured from is measured, not asked for."""
    result = run(program, "--help")
    assert result.returncode == 0, result.stdout
    assert 0 < len(options(result.stdout)) <= MAX_KNOBS, sorted(options(result.stdout))


def test_an_option_counts_once_however_it_is_written():
    """A short form, a negation and a mention in a sentence are not further knobs."""
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
    """26 options are one too many."""
    help_text = "".join(f"  --option-{letter}  a knob\n" for letter in string.ascii_lowercase)
    assert len(options(help_text)) > MAX_KNOBS
