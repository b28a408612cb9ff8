"""JSON files beside a model's weights, trusting nothing in them.

Refuses to know what any field means.
"""

import errno
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from paceline.process.small_files import read_small_file
from paceline_executor.weights.refusals import damaged, unreadable, wrong

MAX_SMALL_FILE_BYTES = 4 << 20
MAX_NUMBER = 1 << 63
_PATIENCE_S = 60.0  # of a disk; a vocabulary may have tens of megabytes


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Raises ModelNotFoundError where it cannot be read, ModelCorruptError where it is larger."""
    try:
        return read_small_file(path, max_bytes, _PATIENCE_S)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise damaged(path, f"it is larger than the {max_bytes} bytes allowed") from error
        raise unreadable(path, error) from error


class JsonFields:
    """Every lookup checks the type and raises ModelCorruptError naming file and field.

    A field that is null counts as absent.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._fields = fields
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_SMALL_FILE_BYTES) -> "JsonFields":
        """Raises ModelNotFoundError or ModelCorruptError."""
        return cls.parse(path, read_bounded(path, max_bytes))

    @classmethod
    def parse(cls, path: Path, data: bytes, what: str = "it") -> "JsonFields":
        """`what` of the file it is. Raises ModelCorruptError, which names both."""
        try:
            fields = json.loads(data)
            if b"\\u" in data:  # Python alone takes half a surrogate pair for a character
                json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"{what} is not JSON") from error
        if not isinstance(fields, dict):
            raise damaged(path, f"{what} is not a JSON object")
        return cls(path, fields, "" if what == "it" else f"{what}: ")

    @classmethod
    def read_if_there(cls, path: Path) -> "JsonFields":
        """A file that is not there has no fields."""
        return cls.read(path) if path.exists() else cls(path, {})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "JsonFields":
        """What the object says is null stays so."""
        return JsonFields(self.path, {**defaults, **self._fields}, self._prefix)

    def without(self, names: Set[str]) -> "JsonFields":
        return JsonFields(self.path, {k: v for k, v in self._fields.items() if k not in names}, self._prefix)

    def empty(self) -> "JsonFields":
        return JsonFields(self.path, {}, self._prefix)

    def name(self, field: str) -> str:
        """With the names of the objects around it, for messages."""
        return f"{self._prefix}{field}"

    def get(self, field: str) -> Any:  # noqa: ANN401 (JSON: the caller checks)
        return self._fields.get(field)

    def stated(self) -> list[tuple[str, Any]]:
        """All that are not null."""
        return [(name, value) for name, value in self._fields.items() if value is not None]

    def object(self, field: str) -> "JsonFields | None":
        value = self._fields.get(field)
        if value is None or isinstance(value, dict):
            return None if value is None else JsonFields(self.path, value, f"{self.name(field)}.")
        raise self.fault(field, "not an object")

    def objects(self) -> list["JsonFields"]:
        """All fields, each an object."""
        return [found for field in self._fields if (found := self.object(field)) is not None]

    def flag(self, field: str) -> bool | None:
        value = self._fields.get(field)
        if value is None or isinstance(value, bool):
            return value
        raise self.fault(field, "not true or false")

    def text(self, field: str) -> str | None:
        value = self._fields.get(field)
        if value is None or isinstance(value, str):
            return value
        raise self.fault(field, "not a string")

    def number(self, field: str) -> float | None:
        """It is finite and below 2**63."""
        value = self._fields.get(field)
        if value is None or _is_number(value):
            return value
        raise self.fault(field, "not a finite number")

    def positive_number(self, field: str, default: float | None = None) -> float:
        """`default` where there is none."""
        value = self.number(field)
        value = default if value is None else value
        if value is None or value <= 0:
            raise self.fault(field, "missing" if value is None else f"{value}, which should be above 0")
        return float(value)

    def positive_integer(self, field: str, limit: int, default: int | None = None) -> int:
        """From 1 to `limit`; `default` where there is none."""
        return self._integer(field, range(1, limit + 1), default)

    def whole_number(self, field: str, limit: int, default: int | None = None) -> int:
        """From 0 to `limit`; `default` where there is none."""
        return self._integer(field, range(limit + 1), default)

    def _integer(self, field: str, allowed: range, default: int | None) -> int:
        value = self._fields.get(field)
        value = default if value is None else value
        if value is None:
            raise self.fault(field, "missing")
        if type(value) is not int:
            raise self.fault(field, "not an integer")
        if value not in allowed:
            raise self.fault(field, f"{value}, outside {allowed[0]} to {allowed[-1]}")
        return value

    def positive_numbers(self, field: str, length: int) -> tuple[float, ...]:
        """There are `length` numbers above 0."""
        value = self._fields.get(field)
        if isinstance(value, list) and len(value) == length and all(_is_number(item) and item > 0 for item in value):
            return tuple(map(float, value))
        raise self.fault(field, f"not a list of {length} numbers above 0")

    def fault(self, field: str, state: str) -> Exception:
        return wrong(self.path, f"{self.name(field)} is {state}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
