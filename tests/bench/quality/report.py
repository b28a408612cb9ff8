"""What was found, as a table for a terminal and as JSON for programs."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from quality.measure import NUM_GIVEN, Quality


@dataclass(frozen=True, slots=True)
class Setting:
    """What was predicted, and by which model."""

    model: str
    text_sha256: str
    num_tokens: int
    window: int


Row = tuple[Mapping[str, str], Quality]
"""What was measured, by the same names in all rows, and its figures. float32 comes first, then what is used."""


def print_table(setting: Setting, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=setting.model)
    (labels, float32), *others = rows
    for name in labels:
        table.add_column(name, no_wrap=True)
    for figure in ("perplexity", "difference", "KL divergence, nats", "same best token"):
        table.add_column(figure, justify="right")
    table.add_row(*labels.values(), f"{float32.perplexity:.4f}", "", "", "")
    for labels, quality in others:
        table.add_row(*labels.values(), f"{quality.perplexity:.4f}", *_differences(quality))
    console.print(table)
    console.print(
        f"{setting.num_tokens:,} tokens of pydoc_data.topics of Python {platform.python_version()} in windows of "
        f"{setting.window}, the first {NUM_GIVEN} of each given: {float32.num_predicted:,} predicted. "
        f"SHA-256 of the text: {setting.text_sha256}",
        highlight=False,
        soft_wrap=True,
    )


def as_json(setting: Setting, rows: Sequence[Row]) -> str:
    """The same in one line. `fast` and `float32` are the perplexities of what is used and of float32."""
    (_, float32), (_, fast), *_ = rows
    return json.dumps(
        {
            "model": setting.model,
            "python": platform.python_version(),
            "text_sha256": setting.text_sha256,
            "num_tokens": setting.num_tokens,
            "window": setting.window,
            "num_predicted": float32.num_predicted,
            "float32": float32.perplexity,
            "fast": fast.perplexity,
            "rows": [{**labels, **asdict(quality)} for labels, quality in rows],
        }
    )


def _differences(quality: Quality) -> tuple[str, ...]:
    return (
        f"{quality.difference:+.2%} ±\N{NO-BREAK SPACE}{quality.standard_error:.2%}",
        f"{quality.kl_divergence:.5f}",
        f"{quality.same_best:.2%}",
    )
