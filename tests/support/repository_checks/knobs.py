"""How many knobs a program has: the long options of its `--help`, and those that CONTRIBUTING.md keeps a place for."""

import re

MAX_KNOBS = 27
MAX_COMMAND_KNOBS = 32  # in groups
NOT_KNOBS = frozenset({"--help", "--version", "--install-completion", "--show-completion"})
# What belongs together is one option, which names a file or folder; OpenTelemetry has variables of its own.
ONE_EACH = ("--tls-", "--token-", "--speculati", "--adapter", "--metrics-", "--record-")
NONE_OF = ("--otel", "--otlp")


def options(help_text: str) -> set[str]:
    """Every long option that starts a line of a help text, `--no-x` counted as the same knob as `--x`."""
    found = re.findall(r"^[\s│]+(?:-\w,? +(?:\w+,? +)?)?(--[a-z][a-z0-9-]*)", help_text, flags=re.MULTILINE)
    return {option.replace("--no-", "--", 1) for option in found} - NOT_KNOBS


def kept_places(document: str, program: str) -> tuple[set[str], set[str]]:
    """The options that a program will get by the table of CONTRIBUTING.md, and those that will make room for them."""
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*) \| ([^|]*) \|", document, flags=re.MULTILINE)
    mine = [(option, meaning) for option, of, meaning in rows if f"`{program}`" in of]
    going = [re.findall(r"in place of `(--[a-z-]+)`", meaning) for _, meaning in mine]
    return {option for option, _ in mine}, {option for names in going for option in names}


def scattered(found: set[str]) -> list[str]:
    """The options of which there is another one for the same subject, or which are none of ours to have."""
    together = ([option for option in found if option.startswith(group)] for group in ONE_EACH)
    several = [option for group in together if len(group) > 1 for option in group]
    return sorted({*several, *(option for option in found if option.startswith(NONE_OF))})
