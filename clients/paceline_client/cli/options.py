"""The options that several commands share, each with the one sentence of its help."""

from pathlib import Path
from typing import Annotated

import typer

from paceline_client.requests import Sampling

DEFAULT_MODEL = "smollm2-135m-instruct"

ModelOption = Annotated[
    str, typer.Option("--model", metavar="PATH|NAME", help="A GGUF file or a folder with one, or a known name.")
]
NumExecutorsOption = Annotated[
    int,
    typer.Option("--executors", metavar="N", min=1, max=64, help="How many executors, each with its own model copy."),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port", metavar="PORT", min=1, max=65533, help="The scheduler's API; +1 is its admin, +2 its health port."
    ),
]
ExecutorPortOption = Annotated[
    int,
    typer.Option(
        "--executor-port", metavar="PORT", min=1, max=64900, help="The first executor's; +2 health, +10 for the next."
    ),
]
MaxNumSeqsOption = Annotated[
    int | None,
    typer.Option("--max-num-seqs", metavar="N", min=1, help="Requests that run at once on an executor."),
]
KvCacheMemoryOption = Annotated[
    str | None,
    typer.Option("--kv-cache-memory", metavar="SIZE", help="Each executor's KV cache, such as 512MiB."),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option("--quantization", metavar="KIND", help="auto: weights as small as the file has them; none: float32."),
]
KvCacheDtypeOption = Annotated[
    str | None, typer.Option("--kv-cache-dtype", metavar="DTYPE", help="Keys and values as float16 (auto) or int8.")
]
HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Where the API listens; executors stay on loopback.")
]
ShutdownOption = Annotated[
    int, typer.Option("--shutdown-timeout", metavar="SECONDS", min=0, help="How long running requests may take to end.")
]
NumThreadsOption = Annotated[
    int | None, typer.Option("--num-threads", metavar="N", min=1, help="CPU threads of each executor.")
]
LogDirOption = Annotated[
    Path | None, typer.Option("--log-dir", metavar="FOLDER", help="Keep each process's log lines in a file here.")
]

MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="Output tokens at most; unset, what the context holds.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="X", help="Randomness; 0 always takes the likeliest token."),
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="X", help="Draw from the likeliest tokens that make up this probability."),
]
TopKOption = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Draw from this many likeliest tokens.")]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", metavar="X", help="Drop tokens less likely than this share of the likeliest.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes the draw repeatable.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text. May be given several times.")
]
ServedModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model to ask; unset, the only one.")
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before the conversation.")
]


def sampling_of(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
) -> Sampling:
    """The options as the library wants them. Ranges are the server's to check."""
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
