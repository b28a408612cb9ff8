"""Another engine's figures on the same GPU, out of a CSV file that a person names.

Columns: numbers, what, shape, unit, value. Values that are no number are passed by. Knows columns; not who measured.
"""

import contextlib
import csv
from collections.abc import Mapping
from pathlib import Path

from gpu.errors import GpuRunError

Place = tuple[str, str, str]
"""Numbers, what, shape: as of a `Figure`."""
_COLUMNS = ("numbers", "what", "shape", "unit", "value")


def read_peer(path: Path | None) -> Mapping[Place, float]:
    """The figures by their places; none without a file. Raises GpuRunError."""
    found: dict[Place, float] = {}
    if path is None:
        return found
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if any(line.get(column) is None for column in _COLUMNS):
                    raise GpuRunError(f"{path} is no table of {', '.join(_COLUMNS)}: look at its first line")
                with contextlib.suppress(ValueError):
                    found[line["numbers"], line["what"], line["shape"]] = float(line["value"])
    except OSError as error:
        raise GpuRunError(f"{path} cannot be read: {error.strerror}") from error
    return found
