"""A program's options, each declared once: as a field of its configuration, with its form, check, help and default.

Beside it the kinds of values that several options have.
"""

import argparse
import dataclasses
import enum
import ipaddress
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.process.help import HelpParser
from paceline.process.small_files import read_small_file
from paceline.process.tls_folder import TlsFolder, TlsFolderError

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=enum.Enum)
_REQUIRED = object()
_OPTION = "option"
_LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_PORT = 65535

Parse = Callable[[str], Any]
"""Raises argparse.ArgumentTypeError with a sentence that quotes the text."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    group: str
    settings: Mapping[str, Any]  # of `add_argument`


def option(group: str, parse: Parse, metavar: str, default: object = _REQUIRED, *, text: str) -> Any:  # noqa: ANN401
    """A field of a dataclass that is also an option: `ttft_budget_s` is `--ttft-budget`. `text` may show the default as
    %(default)s; one that depends on the environment is a function.
    """
    settings = {"type": parse, "metavar": metavar, "help": text}
    settings |= {"required": True} if default is _REQUIRED else {"default": default}
    return dataclasses.field(metadata={_OPTION: _Option(group, settings)})


def flag(group: str, *, text: str) -> Any:  # noqa: ANN401
    """A field that is True where the option is given."""
    return dataclasses.field(metadata={_OPTION: _Option(group, {"action": "store_true", "help": text})})


def parse_options(config: type[Any], parser: HelpParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    """The values of its fields that are options, whose groups are panels of the help in the order of the fields."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in dataclasses.fields(config):
        declared: _Option | None = each.metadata.get(_OPTION)
        if declared is not None:
            group = groups.get(declared.group) or parser.add_argument_group(declared.group)
            groups[declared.group] = group
            name = f"--{each.name.removesuffix('_s').replace('_', '-')}"
            default = declared.settings.get("default")
            settings = {**declared.settings, "default": default()} if callable(default) else declared.settings
            group.add_argument(name, dest=each.name, **settings)
    return vars(parser.parse_args(arguments))


def checked(kind: Callable[[str], _T]) -> Callable[[str], _T]:
    """What raises a ValueError with a sentence, as a kind of value."""

    def parse(text: str) -> _T:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def decimal(least: float, most: float, what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def choice(kinds: type[_Kind]) -> Callable[[str], _Kind]:
    def parse(text: str) -> _Kind:
        try:
            return kinds(text)
        except ValueError:
            known = ", ".join(str(kind.value) for kind in kinds)
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}") from None

    return parse


port_number = number(0, _MAX_PORT)


def port_or_off(text: str) -> int | None:
    """None: off."""
    if text == "off":
        return None
    if not text.isdecimal() or not text.isascii() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a port nor off")
    return int(text)


def host_address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if text != "localhost":
            raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from None
    return text


def tls_folder(text: str) -> TlsFolder:
    try:
        return TlsFolder(Path(text))
    except TlsFolderError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_value(text: str, example: str) -> Any:  # noqa: ANN401
    """A JSON object, or what the file of this name holds."""
    try:
        return json.loads(text if text.lstrip().startswith("{") else read_small_file(Path(text)))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{error}; write JSON such as {example}") from None


def log_level_option(group: str) -> Any:  # noqa: ANN401
    sentence = "Least serious event to print: debug, info, warning or error. [default: %(default)s]"
    return option(group, _level, "LEVEL", "info", text=sentence)


def _level(text: str) -> str:
    if text not in _LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_LOG_LEVELS)}")
    return text


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """A relative $XDG_CACHE_HOME is ignored, as its specification says."""
    own = environ.get("PACELINE_CACHE_DIR", "")
    if own:
        return Path(own).absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
    return (xdg if xdg.is_absolute() else home / ".cache") / "paceline"
