"""`paceline demo`: everything once. One scheduler, one executor, one question, one streamed answer."""

import sys
import time

import typer

from paceline_cli.failures import reported
from paceline_cli.options import DEFAULT_MODEL, ModelOption, NumThreadsOption, names_of
from paceline_cli.services import run_deployment
from paceline_cli.stopwatch import Stopwatch
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, free_ports
from paceline_cli.supervisor.supervisor import Restarts
from paceline_client.async_client import AsyncClient
from paceline_client.requests import Message, Sampling, Stopping
from paceline_client.results import Model

_QUESTION = "What is the capital of France?"
# A model this small is of two minds about the language: without this line "The" and "L'" are equally likely answers.
_INSTRUCTION = "You answer questions in English, in one sentence."
_MAX_TOKENS = 128


def demo(model: ModelOption = DEFAULT_MODEL, num_threads: NumThreadsOption = None) -> None:
    """Start everything, ask one question, stop everything.

    One scheduler and one executor as two processes; the answer is streamed to the terminal. The first run downloads the
    model; later ones start in seconds.
    """
    typer.echo("One scheduler and one executor, two processes on this machine. First they start.", err=True)
    deployment = Deployment(
        options=names_of(demo),
        model=model,
        host=LOOPBACK,
        ports=free_ports(1),
        shutdown_timeout_seconds=10,
        num_threads=num_threads,
    )

    async def ask(models: list[Model]) -> None:
        await ask_and_print(deployment.target, models[0])

    with reported():
        signal_number = run_deployment(deployment, restarts=Restarts.NEVER, log_dir=None, use=ask)
    if signal_number is not None:
        raise typer.Exit(128 + signal_number)
    typer.echo("Both processes have drained and ended.")


async def ask_and_print(target: str, model: Model) -> None:
    typer.echo(f"\nSystem: {_INSTRUCTION}\nYou: {_QUESTION}\n{model.name}: ", nl=False)
    async with AsyncClient(target) as client:
        await client.ensure_connected()
        stopwatch = Stopwatch(time.monotonic)
        stream = client.stream(
            messages=[Message("system", _INSTRUCTION), Message("user", _QUESTION)],
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=_MAX_TOKENS),
        )
        async for delta in stream:
            stopwatch.tokens_arrived(len(delta.token_ids))
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    num_tokens = stream.result.usage.num_output_tokens
    typer.echo(f"\n\n{num_tokens} tokens, {stopwatch.summary()}")
