"""Runs rendered pods as processes of this machine, the way a kubelet does: variables, volumes, probes, hooks, grace.

It refuses to know what runs in them. What differs from a cluster: a pod has one address of the loopback network, which
is also its loopback; the name of a service stands for the addresses of all pods that may come to be behind it.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from chart_checks.dockerfile import image_of
from chart_checks.helm import Object, pod_spec
from repository_checks.programs import BIN

_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - to look for, not to listen on
_MAX_END_S = 60.0
_MAX_READY_S = 480.0  # kernels may have to be compiled, on a machine that is busy with other tests


class PodError(Exception):
    """A pod did what makes a kubelet restart it; the text says what, with the end of its log."""


def addresses() -> Iterator[str]:
    """Loopback addresses that no other test process uses at the same time."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return (f"127.{64 + worker % 64}.{os.getpid() % 250}.{number}" for number in range(1, 255))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does: what is unknown stays, `$$(NAME)` is `$(NAME)`."""

    def value_of(match: re.Match[str]) -> str:
        found = match[0]
        return found[1:] if found.startswith("$$") else variables.get(match[1], found)

    return re.sub(r"\$?\$\(([A-Za-z_][\w.-]*)\)", value_of, text)


@dataclass(slots=True)
class Pod:
    """One pod: `found` is the object that it is a replica of, `services` the addresses behind each service's name."""

    name: str
    found: Object
    address: str
    folder: Path
    services: Mapping[str, Iterable[str]]
    process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _watch: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def spec(self) -> Object:
        return pod_spec(self.found)

    @property
    def container(self) -> Object:
        """The one that stays."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    async def start(self) -> None:
        """Start its container with a root of its own making: image, volumes, variables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        secrets = {volume["name"]: volume["secret"] for volume in self.spec.get("volumes") or () if "secret" in volume}
        for mount in self.container.get("volumeMounts", ()):
            volume = self.folder / mount["name"]
            if mount["name"] not in secrets:
                volume.mkdir(exist_ok=True)
            elif not volume.is_symlink():
                volume.symlink_to(self._secrets / secrets[mount["name"]]["secretName"])
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(), env=self.variables(), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def variables(self) -> dict[str, str]:
        """What the image and the container set, and nothing of this process."""
        image = image_of(self.container["image"])
        variables = {name: self._on_this_machine(value) for name, value in image.environment.items()}
        for variable in self.container.get("env", ()):
            match variable:
                case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
                    value = self.address
                case {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
                    value = (self._secrets / secret / key).read_text(encoding="utf-8")
                case _:
                    value = variable["value"]
            variables[variable["name"]] = value
        return variables | {"PATH": f"{BIN}:{variables['PATH']}"}

    @property
    def _secrets(self) -> Path:
        """A folder for each secret, beside the pods."""
        return self.folder.parent / "secrets"

    def command(self) -> list[str]:
        """The container's, else the image's, with what it would find in its own root and network."""
        image = image_of(self.container["image"])
        program, *before = self.container.get("command") or image.entrypoint
        program = Path(program).name
        args = [*before, *self.container.get("args", image.command)]
        args = [self._on_this_machine(expanded(argument, self.variables())) for argument in args]
        if any(argument.startswith("--admin-port") for argument in args):
            args.append(f"--admin-host={self.address}")
        return [str(BIN / program), *args]

    def _on_this_machine(self, text: str) -> str:
        for mount in self.container.get("volumeMounts", ()):
            if re.match(rf"(--[a-z-]+=)?{mount['mountPath']}(/|$)", text):
                text = text.replace(mount["mountPath"], str(self.folder / mount["name"]), 1)
                break
        found = re.search(r"dns:///([a-z0-9-]+)\.[a-z0-9-]+\.svc:(\d+)", text)
        if found:
            listed = ",".join(f"{address}:{found[2]}" for address in self.services[found[1]])
            text = text.replace(found[0], listed)
        return text.replace(_ALL_ADDRESSES, self.address)

    async def until_ready(self) -> None:
        """Probe as a kubelet does: within the budget of the start-up probe it starts, then it gets ready."""
        startup = self.container["startupProbe"]
        try:
            async with asyncio.timeout(startup["periodSeconds"] * startup["failureThreshold"]):
                await self._until_serving(startup)
            self._watch = asyncio.create_task(self._stay_alive(self.container["livenessProbe"]))
            async with asyncio.timeout(_MAX_READY_S):
                await self._until_serving(self.container["readinessProbe"])
        except TimeoutError:
            raise PodError(f"{self.name} is not ready\n{self.log}") from None

    async def _until_serving(self, probe: Object) -> None:
        while not await self.probe(probe):
            if self.process is not None and self.process.returncode is not None:
                raise PodError(f"{self.name} ended with {self.process.returncode}\n{self.log}")
            await asyncio.sleep(0.05)

    async def probe(self, probe: Object) -> bool:
        """Ask once what a gRPC probe asks."""
        request = HealthCheckRequest(service=probe["grpc"].get("service", ""))
        async with grpc.aio.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            try:
                answer = await HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"])
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == HealthCheckResponse.SERVING)

    async def _stay_alive(self, probe: Object) -> None:
        """Raise PodError when a kubelet would restart it; asks ten times as often."""
        failures = 0
        while failures < probe["failureThreshold"]:
            await asyncio.sleep(probe["periodSeconds"] / 10)
            failures = 0 if await self.probe(probe) else failures + 1
        raise PodError(f"{self.name} is not alive\n{self.log}")

    async def finish(self) -> int:
        """Wait until it ends by itself, which is its exit code."""
        assert self.process is not None, "it was started"
        async with asyncio.timeout(_MAX_END_S):
            return await self.process.wait()

    async def stop(self) -> int:
        """Hook, SIGTERM, exit code; PodError if it outlives its grace period, or a kubelet had restarted it before."""
        if self._watch is not None:
            if self._watch.done():
                await self._watch
            self._watch.cancel()
        assert self.process is not None, "it was started"
        try:
            async with asyncio.timeout(self.spec["terminationGracePeriodSeconds"]):
                hook = self.container.get("lifecycle", {}).get("preStop")
                if hook:
                    hooked = await asyncio.create_subprocess_exec(*hook["exec"]["command"], env=self.variables())
                    assert await hooked.wait() == 0, "a hook that fails ends the container at once"
                self.process.terminate()
                return await self.process.wait()
        except TimeoutError:
            raise PodError(f"{self.name} outlived its grace period\n{self.log}") from None

    async def kill(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def no_pods_left() -> AsyncIterator[list[Pod]]:
    """A list for the pods of a test; those that still run at its end are killed."""
    pods: list[Pod] = []
    try:
        yield pods
    finally:
        for pod in pods:
            await pod.kill()
