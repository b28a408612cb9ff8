"""Which version of Paceline this is."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def this_version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "checkout"  # nobody has installed it
