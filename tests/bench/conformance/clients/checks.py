"""What every client is asked for, and how a script tells what came of it: a line of JSON for each check."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version

BASE_URL = f"{sys.argv[1]}/v1"
MODEL = sys.argv[2]
PROMPT = "Tell me of the sea."
CITIES = ("Paris", "Oslo")
MAX_TOKENS = 24  # of free text; the model is random and would go on
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}


def require_city(city: object) -> None:
    """Raises ValueError."""
    if city not in CITIES:
        raise ValueError(f"{city!r} is none of {CITIES}")


def require_equal(found: object, expected: object) -> None:
    """Raises ValueError; what is expected is never empty."""
    if found != expected or not expected:
        raise ValueError(f"{found!r} came, not {expected!r}")


def report(distribution: str, *checks: Callable[[], None]) -> None:
    """Each is named by its function."""
    for check in checks:
        try:
            check()
            result = "passed"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([f"{distribution} {version(distribution)}", check.__name__, result]), flush=True)
