"""What was found, as a table for a terminal and as JSON for programs."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from paceline_executor.numerics import FLOAT32_NUMERICS, Numerics
from quality.measure import NUM_GIVEN, Quality


@dataclass(frozen=True, slots=True)
class Setting:
    """What was predicted, and by which model."""

    model: str
    text_sha256: str
    num_tokens: int
    window: int


def print_table(setting: Setting, found: Sequence[Quality], console: Console) -> None:
    """Print the figures, float32 first, and the text that they are of."""
    table = Table(title=setting.model)
    table.add_column("weights, KV cache", no_wrap=True)
    for title in ("perplexity", "difference", "KL divergence", "same best token"):
        table.add_column(title, justify="right")
    for each in found:
        table.add_row(_name(each.numerics), f"{each.perplexity:.4f}", *_differences(each))
    console.print(table)
    console.print(
        f"{setting.num_tokens:,} tokens of pydoc_data.topics of Python {platform.python_version()} in windows of "
        f"{setting.window}, the first {NUM_GIVEN} of each given: {found[0].num_predicted:,} predicted. "
        f"SHA-256 of the text: {setting.text_sha256}",
        highlight=False,
        soft_wrap=True,
    )


def as_json(setting: Setting, found: Sequence[Quality]) -> str:
    """The same in one line. `fast` and `float32` are the perplexities of the executor's default and of float32."""
    float32, default = found[0], found[1]
    return json.dumps(
        {
            "model": setting.model,
            "python": platform.python_version(),
            "text_sha256": setting.text_sha256,
            "num_tokens": setting.num_tokens,
            "window": setting.window,
            "num_predicted": float32.num_predicted,
            "float32": float32.perplexity,
            "fast": default.perplexity,
            "rows": [_row(each) for each in found],
        }
    )


def _row(quality: Quality) -> dict[str, str | float]:
    return {
        "weights": quality.numerics.weights.value,
        "kv_cache": quality.numerics.kv.value,
        "perplexity": quality.perplexity,
        "difference_percent": 100 * quality.difference,
        "standard_error_percent": 100 * quality.standard_error,
        "kl_divergence_nats": quality.kl_divergence,
        "same_best_share": quality.same_best,
    }


def _differences(quality: Quality) -> tuple[str, ...]:
    if quality.numerics == FLOAT32_NUMERICS:
        return ("", "", "")
    return (
        f"{quality.difference:+.2%} ± {quality.standard_error:.2%}",
        f"{quality.kl_divergence:.5f} nats",
        f"{quality.same_best:.2%}",
    )


def _name(numerics: Numerics) -> str:
    return f"{numerics.weights.value}, {numerics.kv.value}"
