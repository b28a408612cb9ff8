"""Measure and print: `python -m coupling` with `tests/bench` on the path."""

import os
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coupling.measure import Drawing, coupled_acceptance, drawn_alike, probabilities, rejection_acceptance
from paceline_executor.numerics import FLOAT32_NUMERICS, Quantization, choose_numerics
from paceline_executor.runner.cores import usable_cores
from paceline_executor.testing.models import FirstLayers
from paceline_executor.weights import (
    DEFAULT_MODEL,
    Checkpoint,
    default_cache_dir,
    load_model,
    resolve_model,
)
from paceline_kernels.compiler import jit
from quality.predictor import BLOCK_SIZE, Predictor, predictors
from quality.text import first_tokens, prose, take, windows

_NUM_GIVEN = 16
_NUM_SEEDS = 2
_DRAWINGS = (Drawing(0.7, 1.0), Drawing(1.0, 1.0), Drawing(1.0, 0.95))
app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(metavar="NAME_OR_PATH", help="As of paceline-executor.")] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=64, help="How many tokens of the text to take.")] = 512,
    layers: Annotated[str, typer.Option(help="How many layers drafters have, with commas between.")] = "30,28,24",
) -> None:
    """Compare both acceptances of what the model's packed first layers draft for the model in float32."""
    path = resolve_model(model, cache_dir=default_cache_dir(os.environ), on_progress=lambda _: None)
    checkpoint, tokenizer = load_model(path)
    jit.set_num_threads(min(usable_cores(), jit.max_threads()))
    cut = windows(take(prose(), tokenizer, tokens).token_ids, 256, first_tokens(tokenizer))
    cut = [window for window in cut if len(window) > _NUM_GIVEN]
    (target,) = predictors(checkpoint, [FLOAT32_NUMERICS], 256)
    drafters = {int(number): _drafter(checkpoint, int(number)) for number in layers.split(",")}
    table = Table("layers", "temperature", "top_p", "rejection sampling", "coupling", "drawn", title=path.name)
    for number, drafter in drafters.items():
        found = {drawing: torch.zeros(3, dtype=torch.float64) for drawing in _DRAWINGS}
        num_places = 0
        for window in track(cut, f"{number} layers", console=Console(stderr=True), transient=True):
            p, q = target.logprobs(window, _NUM_GIVEN), drafter.logprobs(window, _NUM_GIVEN)
            num_places += len(p)
            for drawing in _DRAWINGS:
                found[drawing] += _sums(p, q, drawing)
        for drawing, sums in found.items():
            shares = [f"{share:.3f}" for share in (sums / num_places).tolist()]
            table.add_row(str(number), str(drawing.temperature), str(drawing.top_p), *shares)
    Console().print(table, f"{num_places} places, {_NUM_SEEDS} draws at each", sep="\n")


def _drafter(checkpoint: Checkpoint, num_layers: int) -> Predictor:
    cut = FirstLayers(checkpoint, num_layers)
    return predictors(cut, [choose_numerics(Quantization.AUTO, None, cut.config, BLOCK_SIZE)], 256)[0]


def _sums(p: torch.Tensor, q: torch.Tensor, drawing: Drawing) -> torch.Tensor:
    """Both acceptances and the share of equal draws, each summed over all places."""
    of_target, of_drafter = probabilities(p, drawing), probabilities(q, drawing)
    alike = sum(drawn_alike(p, q, drawing, seed).sum() for seed in range(_NUM_SEEDS))
    accepted = (rejection_acceptance(of_target, of_drafter), coupled_acceptance(of_target, of_drafter))
    return torch.tensor([*(float(each.sum()) for each in accepted), float(alike) / _NUM_SEEDS], dtype=torch.float64)


if __name__ == "__main__":
    app()
