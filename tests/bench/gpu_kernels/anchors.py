"""Measured kernel times of other stacks, out of the CSV files that a person names by their folder.

Each file has a column `stack`, one that names a type, the sizes, and `latency_us`. Knows the columns; not who measured.
"""

import csv
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_HEADS = ("num_heads", "num_key_value_heads", "head_dim")


class MeasurementError(Exception):
    """What somebody else than a programmer can mend; its text is a sentence for whoever ran the measurement."""


class AnchorTable(enum.Enum):
    """The files: the end of their name before `.csv`, the column of a type, and those of sizes as in `AnchorKey`."""

    GEMM = ("gemm", "gemm_dtype", ("m", "n", "k"))
    DECODE = ("decode_attention", "kv_cache_dtype", ("batch_size", "context", *_HEADS))
    PREFILL = ("prefill_attention", "kv_cache_dtype", ("batch_size", "isl", *_HEADS))


_Place = tuple[AnchorTable, str, tuple[int, ...]]  # with a type and sizes


@dataclass(frozen=True, slots=True)
class AnchorKey:
    """What a kernel has to be compared with: the fastest of these types and of exactly these sizes."""

    table: AnchorTable
    types: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Anchor:
    """The fastest kernel that was measured for a shape."""

    stack: str
    us: float


@dataclass(frozen=True, slots=True)
class Anchors:
    """The fastest ones, by table, type and sizes."""

    fastest: Mapping[_Place, Anchor]

    def best(self, key: AnchorKey | None) -> Anchor | None:
        """The one to compare with, if any was measured."""
        if key is None:
            return None
        found = (self.fastest.get((key.table, name, key.sizes)) for name in key.types)
        return min((anchor for anchor in found if anchor), key=lambda anchor: anchor.us, default=None)


def read_anchors(folder: Path | None, gpu: str = "h200") -> Anchors:
    """The anchors of a GPU in a folder; none without a folder. Raises MeasurementError."""
    fastest: dict[_Place, Anchor] = {}
    if folder is None:
        return Anchors(fastest)
    for table in AnchorTable:
        for place, anchor in _read(folder, gpu, table):
            if place not in fastest or anchor.us < fastest[place].us:
                fastest[place] = anchor
    return Anchors(fastest)


def _read(folder: Path, gpu: str, table: AnchorTable) -> Iterator[tuple[_Place, Anchor]]:
    file_name, name, sizes = table.value
    path = folder / f"{gpu}_{file_name}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                place = (table, line[name], tuple(int(line[size]) for size in sizes))
                yield place, Anchor(line["stack"], float(line["latency_us"]))
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        wanted = ", ".join(("stack", name, *sizes, "latency_us"))
        raise MeasurementError(f"{path} is no table of {wanted}: {error!r}") from error
