"""`paceline models`: what is served."""

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline_cli.client import cli_client
from paceline_cli.config import DEFAULT_TARGET, TargetOption
from paceline_cli.failures import reported
from paceline_cli.options import TlsDirOption, TokenFileOption
from paceline_cli.output import echo_json
from paceline_cli.waiting import WaitingNotice
from paceline_client.results import Model


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: TlsDirOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """List the models that can be asked."""
    with reported(), cli_client(target, tls_dir, token_file) as client:
        with WaitingNotice(client):
            served = client.list_models()
        if as_json:
            echo_json([model_fields(model) for model in served])
        elif served:
            Console().print(table_of(served))
        else:
            typer.echo("No executor is attached, so no model is served.", err=True)


def model_fields(model: Model) -> dict[str, object]:
    """A model for programs; of its sampling defaults only those that are set."""
    fields = dataclasses.asdict(model)
    fields["default_sampling"] = {name: value for name, value in fields["default_sampling"].items() if value}
    return fields


def table_of(served: list[Model]) -> Table:
    table = Table(box=None, pad_edge=False)
    has_parts = any(model.supports_tools or model.supports_reasoning for model in served)
    for name, justify in _COLUMNS if has_parts else _COLUMNS[:-1]:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for model in served:
        size = "" if model.num_parameters is None else f"{model.num_parameters / 1e6:.0f} M"
        form, memory, bits = model.quantization or "unquantised", "", ""
        if model.weight_bytes is not None:
            memory = f"{model.weight_bytes / 2**20:,.0f} MiB"
            bits = f"{model.weight_bytes * 8 / model.num_parameters:.1f}" if model.num_parameters else ""
        numbers = str(model.max_model_len), str(model.num_executors)
        parts = [_PARTS[model.supports_tools, model.supports_reasoning]] if has_parts else []
        table.add_row(model.name, model.architecture, size, form, bits, memory, *numbers, *parts)
    return table


_PARTS = {(False, False): "", (True, False): "tools", (False, True): "think", (True, True): "both"}
_COLUMNS = (
    ("Model", "left"),
    ("Architecture", "left"),
    ("Size", "right"),
    ("Weights", "left"),
    ("Bits", "right"),
    ("Memory", "right"),
    ("Context", "right"),
    ("Executors", "right"),
    ("Parts", "left"),  # where there are any: 80 columns are few
)
