"""Runs helm on the chart without a cluster, and gives what it renders as objects."""

import functools
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from repository_checks.programs import BIN
from repository_checks.sources import ROOT

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""

CHART = ROOT / "helm" / "paceline"
VALUES_FILES = sorted((CHART / "ci").glob("*.yaml"))
# Helm 4 as the Makefile fetches it is for this processor alone.
PROGRAMS = ("helm", "helm4") if platform.machine() == "x86_64" else ("helm",)
RELEASE = "rel"
NAMESPACE = "models"


class HelmError(Exception):
    """Helm refused; the text is what it said."""


def helm(*arguments: str | Path, program: str = "helm") -> str:
    """Return what helm prints; raises HelmError. `program` is `helm`, which is version 3, or `helm4`."""
    command = [str(BIN / program), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise HelmError(ended.stdout + ended.stderr)
    return ended.stdout


def render(file: Path, values: Mapping[str, Any] | None = None, *, program: str = "helm") -> list[Object]:
    """The objects of a values file, with further values by their paths, as `{"standby.enabled": False}`."""
    return list(_rendered(file, _overrides(values or {}), program))


def lint(file: Path, values: Mapping[str, Any], *, program: str = "helm") -> None:
    """Raises HelmError where `helm lint --strict` complains."""
    helm("lint", CHART, "--strict", "--quiet", "-f", file, *_overrides(values), program=program)


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--set-json={path}={json.dumps(value)}" for path, value in values.items())


@functools.cache
def _rendered(file: Path, overrides: tuple[str, ...], program: str) -> tuple[Object, ...]:
    text = helm("template", RELEASE, CHART, "-n", NAMESPACE, "-f", file, *overrides, program=program)
    return tuple(found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found)


def render_all(folder: Path, releases: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[str]:
    """The text of each of many releases, in one run: `folder` becomes a chart that has the chart once for each.

    They are called by numbers there, where a label of the chart has its name.
    """
    shutil.copytree(CHART, folder / "charts" / CHART.name)
    values = [json.dumps(_changed(file, changes)) for file, changes in releases]
    names = {text: f"release-{number}" for number, text in enumerate(dict.fromkeys(values))}
    parts = [{"name": CHART.name, "version": "*", "alias": name} for name in names.values()]
    chart = {"apiVersion": "v2", "name": "all", "version": "0.1.0", "dependencies": parts}
    (folder / "Chart.yaml").write_text(json.dumps(chart), encoding="utf-8")
    together = {name: json.loads(text) for text, name in names.items()}
    (folder / "values.yaml").write_text(json.dumps(together), encoding="utf-8")
    text = helm("template", RELEASE, folder, "-n", NAMESPACE)
    text = re.sub(r"(helm\.sh/chart: )release-\d+", rf"\1{CHART.name}", text)
    found = dict.fromkeys(names.values(), "")
    for part in text.split("# Source: all/charts/")[1:]:
        name, _, objects = part.partition("/")
        found[name] += f"# {objects}"
    return [found[names[text]] for text in values]


def _changed(file: Path, changes: Mapping[str, Any]) -> Object:
    values: Object = yaml.safe_load(file.read_text(encoding="utf-8"))
    for path, value in changes.items():
        *folders, name = path.split(".")
        functools.reduce(lambda part, folder: part.setdefault(folder, {}), folders, values)[name] = value
    return values


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [found for found in of_kind(objects, kind) if found["metadata"]["name"] == name]
    return found


def pod_spec(found: Object) -> Object:
    """What the pods of an object are; a pod is its own."""
    spec: Object = found["spec"] if found["kind"] == "Pod" else found["spec"]["template"]["spec"]
    return spec


def pod_labels(found: Object) -> dict[str, str]:
    """The labels of an object's pods; of a pod, its own."""
    metadata = found["metadata"] if found["kind"] == "Pod" else found["spec"]["template"]["metadata"]
    return dict(metadata["labels"])


def with_pods(objects: list[Object]) -> list[Object]:
    """A LeaderWorkerSet is two: of its leaders, and of its workers."""
    found = of_kind(objects, "Deployment", "StatefulSet", "Pod")
    groups = of_kind(objects, "LeaderWorkerSet")
    return found + [part_of(group, part) for group in groups for part in ("leader", "worker")]


def part_of(group: Object, part: str) -> Object:
    """Leaders, or workers, of a LeaderWorkerSet, with the claims that both have."""
    template: Object = group["spec"]["leaderWorkerTemplate"]
    claims = template.get("volumeClaimTemplates", [])
    return group | {"spec": group["spec"] | {"template": template[f"{part}Template"], "volumeClaimTemplates": claims}}


def containers(spec: Object) -> list[Object]:
    """The containers of a pod, those that run first included."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()
