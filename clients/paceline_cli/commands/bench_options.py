"""The options of `paceline bench`, named as in `vllm bench serve` where it has them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ServerKind(StrEnum):
    PACELINE = "paceline"
    OPENAI = "openai"


BackendOption = Annotated[
    ServerKind,
    typer.Option(
        "--backend",
        metavar="KIND",
        help="A paceline scheduler, or with openai any server with OpenAI's /v1/completions.",
    ),
]
BaseUrlOption = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="With --backend openai: where, up to and with /v1.")
]
MaxConcurrencyOption = Annotated[
    str | None,
    typer.Option("--max-concurrency", metavar="N,…", help="Closed loop: requests at once. Unset, 1,4,16,32,64."),
]
RequestRateOption = Annotated[
    str | None, typer.Option("--request-rate", metavar="X,…", help="Open loop: requests per second, at random times.")
]
BurstinessOption = Annotated[
    float | None,
    typer.Option("--burstiness", metavar="X", help="Shape of the gaps: 1 Poisson, below it bursts. Unset, 1."),
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Replay times and lengths of a .csv or .jsonl trace.")
]
ScaleLengthsOption = Annotated[
    float | None, typer.Option("--scale-lengths", metavar="X", help="Lengths of the trace times this, such as 0.125.")
]
ScaleRateOption = Annotated[
    float | None, typer.Option("--scale-rate", metavar="X", help="Speed of the trace times this, such as 0.5.")
]
InputLenOption = Annotated[
    str | None, typer.Option("--input-len", metavar="N|A-B", help="Prompt tokens; random for a range. Unset, 128.")
]
OutputLenOption = Annotated[
    str | None, typer.Option("--output-len", metavar="N|A-B", help="Output tokens; random for a range. Unset, 128.")
]
SharedPrefixLenOption = Annotated[
    int | None,
    typer.Option("--shared-prefix-len", metavar="N", min=0, help="Tokens that all prompts share, in addition."),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option("--num-prompts", metavar="N", min=1, help="Requests per rung. Unset, 200, or the whole trace."),
]
NumWarmupsOption = Annotated[
    int, typer.Option("--num-warmups", metavar="N", min=0, help="Requests before the first rung, not measured.")
]
BenchSeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Prompts, lengths and times follow from it.")]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Whether answers go on to the full output length.")
]
BenchTemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="X", help="0 always takes the likeliest token.")
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="KEY:MS …", help="What makes a request good: ttft:300 tpot:50 e2el:9000."),
]
MoreGoodputArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY:MS", help="Further objectives of --goodput.")
]
CostOption = Annotated[
    float | None,
    typer.Option("--cost-per-hour", metavar="X", min=0, help="What the machine costs, for cost per token."),
]
OutputFileOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write a line of JSON for each rung, as vllm bench serve."),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FOLDER", help="Write PNGs: throughput and latency, gaps over time.")
]
