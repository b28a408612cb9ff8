"""How many knobs a process has: the long options of its `--help`."""

import re

MAX_KNOBS = 25
NOT_KNOBS = frozenset({"--help", "--version"})


def options(help_text: str) -> set[str]:
    """Every long option that starts a line of a help text, `--no-x` counted as the same knob as `--x`."""
    found = re.findall(r"^[\s│]+(?:-\w,? +(?:\w+,? +)?)?(--[a-z][a-z0-9-]*)", help_text, flags=re.MULTILINE)
    return {option.replace("--no-", "--", 1) for option in found} - NOT_KNOBS
