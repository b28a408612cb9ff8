"""`paceline up`: a scheduler and its executors on this machine, kept running."""

import asyncio
from collections.abc import Iterable

import typer

from paceline_cli import options
from paceline_cli.config import DEFAULT_TARGET
from paceline_cli.failures import reported
from paceline_cli.output import never_waiting
from paceline_cli.services import run_deployment
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, fixed_ports, gateway_ports
from paceline_cli.supervisor.supervisor import Restarts
from paceline_client.results import Model


@options.hands_on
def up(
    model: options.ModelIfAnyOption = None,
    offline: options.OfflineOption = False,
    num_executors: options.NumExecutorsOption = 1,
    standby: options.StandbyOption = False,
    gateway: options.GatewayOption = False,
    host: options.HostOption = LOOPBACK,
    insecure: options.InsecureOption = False,
    tls_dir: options.OwnTlsDirOption = None,
    tokens: options.TokensOption = None,
    port: options.PortOption = 50051,
    executor_port: options.ExecutorPortOption = 50061,
    metrics_port: options.MetricsPortOption = None,
    num_threads: options.NumThreadsOption = None,
    runner: options.RunnerOption = None,
    shutdown_timeout: options.ShutdownOption = 30,
    log_dir: options.LogDirOption = None,
    *,
    handed: options.Handed,
) -> None:
    """Run a scheduler and executors on this machine.

    A process that dies is started again: at once if it had served, else after a pause. One that cannot work at
    all, with a wrong option or without its model, ends everything with one line that says why; but once it has
    served it is started again whatever it says, after pauses of up to 10 s.

    Ctrl-C lets running requests finish, then stops everything; a second Ctrl-C stops at once. The exit code is 0 only
    where nothing was given up.
    """
    ports = fixed_ports(port, executor_port, num_executors, metrics_port)
    deployment = Deployment(
        options=options.names_of(up),
        model=options.model_for(runner, model),
        host=host,
        insecure=insecure,
        tls_dir=tls_dir,
        tokens=tokens,
        ports=ports,
        shutdown_timeout_seconds=shutdown_timeout,
        num_threads=num_threads,
        runner=runner,
        offline=offline,
        scheduler_options=handed.scheduler,
        executor_options=handed.executor,
        with_standby=standby,
        gateway=gateway_ports(ports) if gateway else None,
    )

    async def announce(models: list[Model]) -> None:
        typer.echo(ready_text(deployment, models))
        await asyncio.Event().wait()

    with never_waiting(), reported():
        run_deployment(deployment, restarts=Restarts.ALWAYS, log_dir=log_dir, use=announce)
        typer.echo("Stopped.", err=True)


def ready_text(deployment: Deployment, models: list[Model]) -> str:
    host, schedulers = deployment.host, deployment.schedulers
    names = ", ".join(model.name for model in models) or deployment.model or "simulated"
    apis = _addresses(host, (scheduler.api for scheduler in schedulers))
    admins = _addresses(LOOPBACK, (scheduler.admin for scheduler in schedulers))
    healths = _addresses(host, (scheduler.health for scheduler in schedulers))
    executors = _addresses(LOOPBACK, (executor.api for executor in deployment.ports.executors))
    metrics = ", ".join(
        (
            _addresses(host, (scheduler.metrics for scheduler in schedulers)),
            _addresses(LOOPBACK, (executor.metrics for executor in deployment.ports.executors)),
        )
    )
    http = ""
    if deployment.gateway is not None:
        scheme = "http" if deployment.tls_dir is None else "https"
        http = f"  OpenAI     {scheme}://{_addresses(host, [deployment.gateway.http])}/v1\n"
        metrics += f", {_addresses(host, [deployment.gateway.metrics])}"
    standby = "\nOne scheduler drives the executors, the other one stands by.\n" if deployment.with_standby else ""
    is_default = deployment.target.replace("127.0.0.1", "localhost") == DEFAULT_TARGET
    option = "" if is_default else f" --target {deployment.target}"
    if deployment.tls_dir is not None:
        option += f" --tls-dir {deployment.tls_dir}"
    if deployment.tokens is not None:
        option += " --token-file FILE"
    return f"""
Ready: {names}

  API        {apis}
{http}  Admin      {admins}
  Health     {healths}
  Executors  {executors}
  Metrics    {metrics}
{standby}
In another terminal:
  paceline chat{option}
  paceline generate{option} "Why is the sky blue?"
  paceline models{option}
  paceline top{option}

Ctrl-C stops everything.
"""


def _addresses(host: str, ports: Iterable[int]) -> str:
    in_brackets = f"[{host}]" if ":" in host else host
    return ", ".join(f"{in_brackets}:{port}" for port in ports)
