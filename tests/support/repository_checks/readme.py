"""Finds what a README tells its reader to run, and makes a script of it that can be run against a test's own system.

Knows Markdown fences and the few commands that a test cannot run as they stand. Refuses to know how to start a system.
"""

import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RUNNABLE = ("sh", "python")
# What is read, not run.
SHOWN = ("text", "proto", "json", "yaml", "toml")

# Commands that the test run itself consists of, or that run for hours: looked up in the Makefile, not run.
_MAKE_ONLY_LOOKED_UP = re.compile(r"^make (?=(?:\w+=\S+ )*(?:test|lint|soak|bench\S*|clean)\b)", flags=re.MULTILINE)
# The system that the other commands talk to: the test has started it before.
_STARTS_THE_SYSTEM = re.compile(r"^paceline up\b", flags=re.MULTILINE)
# A conversation may go on for as long as the model likes.
_CHATS = re.compile(r"^paceline chat\b", flags=re.MULTILINE)
_TALKS_TO_THE_SYSTEM = re.compile(r"localhost:\d+|^paceline (?!up\b|demo\b)", flags=re.MULTILINE)
# Ports of services that a block starts: they are free ones when it is run.
_OWN_PORT = re.compile(r"--(?:\w+-)?port ([1-9]\d*)")
_ACTIVATES = re.compile(r"^\. \S+/bin/activate$", flags=re.MULTILINE)
_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LOOKS_LIKE_A_FENCE = re.compile(r"^[ \t>]*(?:```|~~~).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block that a reader is told to run."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def talks_to_the_system(self) -> bool:
        """Whether the block needs a running system, since it starts none."""
        return not self.own_ports and _TALKS_TO_THE_SYSTEM.search(self.text) is not None

    @property
    def own_ports(self) -> list[str]:
        """The ports of the services that the block starts."""
        return _OWN_PORT.findall(self.text)


def runnable_blocks(path: Path, text: str) -> Iterator[Block]:
    """Every fenced block of a document whose language says that it can be run."""
    for match in _FENCE.finditer(text):
        if match["language"] in RUNNABLE:
            line = text.count("\n", 0, match.start()) + 1
            yield Block(path, line, match["language"], match["text"])


def undecided_fences(path: Path, text: str) -> Iterator[str]:
    """Place and first line of every fenced block of which it is not said whether it is to be run."""
    known = (*RUNNABLE, *SHOWN)
    # Blocks that are in order are blanked, line by line: what looks like a fence then belongs to none of them.
    rest = _FENCE.sub(lambda match: match[0] if match["language"] not in known else "\n" * match[0].count("\n"), text)
    for match in _LOOKS_LIKE_A_FENCE.finditer(rest):
        yield f"{path}:{rest.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def broken_links(document: Path) -> Iterator[str]:
    """Every link of a document to a file, or to a heading of one, that is not there. The web is not asked."""
    for target in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        name, _, heading = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (heading and heading not in _headings(path)):
            yield target


def _headings(document: Path) -> set[str]:
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in _HEADING.findall(text)}


def as_script(block: Block, addresses: Mapping[str, str], *, typed_before: Iterable[Block] = ()) -> str:
    """The block as it is to be run: `addresses` maps addresses, or ports, written in READMEs to the test's own.

    Of blocks that were typed before into the same shell what lasts is repeated: where commands are found.
    """
    script = block.text
    if block.language == "sh":
        lasting = dict.fromkeys(line for other in typed_before for line in _ACTIVATES.findall(other.text))
        script = "".join(f"{line}\n" for line in lasting if line not in script) + script
        script = _MAKE_ONLY_LOOKED_UP.sub("make --dry-run --always-make ", script)
        script = _STARTS_THE_SYSTEM.sub(": paceline up", script)
        script = _CHATS.sub("paceline chat --temperature 0 --max-tokens 16", script)
    for written, own in addresses.items():
        script = script.replace(written, own)
    return script


def install_grpcurl(folder: Path) -> None:
    """Put a `grpcurl` into a folder of the search path that hands its calls to `buf curl`."""
    program = folder / "grpcurl"
    ours = Path(__file__).resolve().parents[1]
    program.write_text(f"#!/bin/sh\nPYTHONPATH='{ours}' exec '{sys.executable}' -m repository_checks.grpcurl \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
