"""A release on this machine: installed, upgraded and removed by the rules of Deployment and StatefulSet.

It knows in which order their controllers start and end pods, and refuses to know what a pod is.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chart_checks.helm import Object, named, of_kind, pod_labels, selects, with_pods
from chart_checks.pods import Pod, addresses

_MAX_PODS_PER_OBJECT = 4


@dataclass(slots=True)
class Cluster:
    """The pods of one release; `pods` are all that ever ran, `exit_codes` those that were told to end."""

    folder: Path
    pods: list[Pod]
    objects: list[Object] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)
    _free: dict[str, Iterator[str]] = field(default_factory=dict)
    _services: dict[str, list[str]] = field(default_factory=dict)
    _running: dict[str, list[Pod]] = field(default_factory=dict)

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    def addresses_of(self, service: str) -> list[str]:
        """The addresses behind a service, now and later."""
        return self._services[service]

    def targets(self, service: str) -> str:
        """The same with the port, as clients take them."""
        ports = {item["name"]: item["port"] for item in named(self.objects, "Service", service)["spec"]["ports"]}
        return ",".join(f"{address}:{ports['grpc']}" for address in self._services[service])

    async def install(self, objects: list[Object]) -> None:
        """Start the pods of every object, all at once, and wait until they are ready."""
        if not self.objects:
            self.plan(objects)
        starting = [
            self._start(found, number)
            for found in of_kind(objects, "StatefulSet", "Deployment")
            for number in range(found["spec"]["replicas"])
        ]
        for pod in await asyncio.gather(*starting):
            self._running.setdefault(name_of(pod.found), []).append(pod)
        async with asyncio.TaskGroup() as waiting:
            for pod in self.pods:
                waiting.create_task(pod.until_ready())

    async def upgrade(self, objects: list[Object]) -> None:
        """Bring the pods to what the objects say now; those whose template is the same stay."""
        before, self.objects = {name_of(found): found for found in with_pods(self.objects)}, objects
        for found in of_kind(objects, "Deployment", "StatefulSet"):
            if found["spec"]["template"] == before[name_of(found)]["spec"]["template"]:
                continue
            if found["kind"] == "Deployment":
                await self._roll_deployment(found)
            else:
                await self._roll_stateful_set(found)

    async def test(self) -> list[Pod]:
        """Run the pods of `helm test` to their end; returns them, their exit codes among the others."""
        tests = []
        for found in of_kind(self.objects, "Pod"):
            pod = await self._start(found, 0)
            self.exit_codes[pod.name] = await pod.finish()
            tests.append(pod)
        return tests

    async def uninstall(self) -> None:
        await asyncio.gather(*(self._stop(pod) for pods in self._running.values() for pod in pods))

    async def _roll_deployment(self, found: Object) -> None:
        """As many more pods at a time as `maxSurge` allows; an old one ends when a new one is ready."""
        strategy = found["spec"]["strategy"]["rollingUpdate"]
        assert (strategy["maxSurge"], strategy["maxUnavailable"]) == (1, 0), "no other strategy is played here"
        running = self._running[name_of(found)]
        for old in list(running):
            new = await self._start(found, len(self.pods))
            await new.until_ready()
            await self._stop(old)
            running.remove(old)
            running.append(new)

    async def _roll_stateful_set(self, found: Object) -> None:
        """From the last to the first, each at its address and with its volumes; the next when this one is ready."""
        running = self._running[name_of(found)]
        for index, old in reversed(list(enumerate(running))):
            await self._stop(old)
            running[index] = Pod(old.name, found, old.address, old.folder, self._services)
            self.pods.append(running[index])
            await running[index].start()
            await running[index].until_ready()

    async def _start(self, found: Object, number: int) -> Pod:
        name = f"{name_of(found)}-{number}"
        pod = Pod(name, found, next(self._free[name_of(found)]), self.folder / name, self._services)
        self.pods.append(pod)
        await pod.start()
        return pod

    async def _stop(self, pod: Pod) -> None:
        self.exit_codes[f"{pod.name} {len(self.exit_codes)}"] = await pod.stop()

    def plan(self, objects: list[Object]) -> None:
        """Each object's pods get addresses; services stand for those that an object may come to use."""
        self.objects = objects
        free = addresses()
        for found in with_pods(self.objects):
            replicas = found["spec"].get("replicas", 1)
            own = [next(free) for _ in range(min(_MAX_PODS_PER_OBJECT, 2 * replicas))]
            self._free[name_of(found)] = iter(own)
            for service in of_kind(self.objects, "Service"):
                if selects(service["spec"]["selector"], pod_labels(found)):
                    used = own[:replicas] if found["kind"] == "StatefulSet" else own
                    self._services.setdefault(service["metadata"]["name"], []).extend(used)


def name_of(found: Object) -> str:
    return f"{found['metadata']['name']}"
