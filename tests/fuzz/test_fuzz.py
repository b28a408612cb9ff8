"""Parsers of foreign bytes, tried with sound inputs, with what once broke them, and with these cut and changed.

`make soak` looks for more, for ten minutes a parser.
"""

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fuzzing.__main__ import FINDS
from fuzzing.targets import TARGETS

MAX_GROWTH_KB = 256 * 1024
NUM_CHANGED = 60
# Each of its inputs goes through processes of its own: `make test` tries a few.
COSTLY, NUM_OF_COSTLY = "tokenizer-json", 8


def corpus_of(target):
    """Sound inputs, and what was found."""
    return [*target.seeds(), *(path.read_bytes() for path in sorted((FINDS / target.name).glob("*")))]


def changed(data, chance):
    """The input with some bytes cut out, doubled or replaced."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice((1, 1, 2, 8, 100)))
        part = chance.choice((b"", changed[start:end] * 2, chance.randbytes(end - start), b"\xff" * (end - start)))
        changed[start:end] = part
    return bytes(changed)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_parser_takes_or_refuses_what_it_is_given(target, request):
    chance = random.Random(target.name)  # noqa: S311
    corpus = corpus_of(target)
    for data in corpus:
        target.run(data)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_cut_short = target.name == COSTLY and request.config.getoption("--tier") == "test"
    for _ in range(NUM_OF_COSTLY if is_cut_short else NUM_CHANGED):
        target.run(changed(chance.choice(corpus), chance))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MAX_GROWTH_KB


def test_what_was_found_is_tried():
    assert {path.name for path in FINDS.iterdir()} <= set(TARGETS)


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found_in_ten_minutes(name):
    support = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-m", "fuzzing", name, "--seconds", "600"]
    done = subprocess.run(command, cwd=support, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
