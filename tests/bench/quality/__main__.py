"""Measure and print: `python -m quality` with `tests/bench` on the path, or `make quality`."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from paceline.process.options import default_cache_dir
from paceline_executor.errors import ExecutorError
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, Quantization, choose_cpu_numerics
from paceline_executor.runner.cores import usable_cores
from paceline_executor.weights import DEFAULT_MODEL, ModelConfig, load_model, resolve_model
from paceline_kernels.compiler import jit
from quality.measure import NUM_GIVEN, measure
from quality.predictor import BLOCK_SIZE
from quality.report import Setting, as_json, print_table
from quality.text import first_tokens, prose, take, windows

progress = Console(stderr=True)
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    model: Annotated[str, typer.Option(metavar="NAME_OR_PATH", help="As of paceline-executor.")] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=NUM_GIVEN + 1, help="How many tokens of the text to take.")] = 8192,
    window: Annotated[int, typer.Option(min=NUM_GIVEN + 1, help="How many tokens are read together.")] = 512,
    json: Annotated[
        typer.FileTextWrite | None, typer.Option(metavar="FILE", help="Write the figures there; - is stdout.")
    ] = None,
) -> None:
    """Compare the executor's fast numbers with float32 of the same model file, by predicting a text."""
    try:
        path = resolve_model(model, cache_dir=default_cache_dir(os.environ), on_progress=lambda _: None)
        checkpoint, tokenizer = load_model(path)
        kinds = _kinds(checkpoint.config)
    except ExecutorError as error:
        raise typer.BadParameter(str(error)) from None
    if window > checkpoint.config.max_model_len:
        raise typer.BadParameter(f"--window: the model takes {checkpoint.config.max_model_len} tokens at most")
    sample = take(prose(), tokenizer, tokens)
    if len(sample.token_ids) < tokens:
        raise typer.BadParameter(f"--tokens: the text has {len(sample.token_ids)}")
    jit.set_num_threads(min(usable_cores(), jit.max_threads()))
    cut = windows(sample.token_ids, window, first_tokens(tokenizer))
    read = track(cut, "predicting", console=progress, transient=True)
    found = measure(checkpoint, kinds, read, window)
    labels = [{"weights": each.weights, "kv_cache": each.kv.value} for each in (FLOAT32_NUMERICS, *kinds)]
    rows = list(zip(labels, found, strict=True))
    setting = Setting(path.name, sample.sha256, tokens, window)
    print_table(setting, rows, Console())
    if json is not None:
        json.write(as_json(setting, rows) + "\n")


def _kinds(config: ModelConfig) -> list[Numerics]:
    """What executors compute in, their default first."""
    kinds = (KvDtype.INT8, KvDtype.FLOAT16)
    return [choose_cpu_numerics(Quantization.AUTO, kv, config, BLOCK_SIZE) for kv in kinds]


if __name__ == "__main__":
    app()
