"""The chart's values: each is documented, has a schema and does something; what cannot be meant is refused in words."""

import json
import re

import pytest
import yaml

from chart_checks.helm import CHART, PROGRAMS, HelmError, helm, render

GPUS = CHART / "ci" / "gpu-cert-manager.yaml"
MINIMAL = CHART / "ci" / "minimal.yaml"
CLAIM = CHART / "ci" / "secrets-claim.yaml"
TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
MONITORING = CHART / "ci" / "monitoring.yaml"
SCALING = ("minReplicas", "maxReplicas", "queuedRequests", "runningRequests", "serverAddress")
PERSON = {"runAsNonRoot": True, "runAsUser": 5}

# For every value another one that may be meant, and the file that it is set beside.
OTHERS = {
    "fullnameOverride": (MINIMAL, "other"),
    "image.registry": (MINIMAL, "example.com"),
    "image.tag": (MINIMAL, "9"),
    "image.pullPolicy": (MINIMAL, "Always"),
    "image.pullSecrets": (MINIMAL, [{"name": "a"}]),
    "tls.source": (GPUS, "none"),
    "tls.certManager.issuerRef": (GPUS, {"name": "other"}),
    "tls.secrets.scheduler": (CLAIM, "other"),
    "tls.secrets.executor": (CLAIM, "other"),
    "tls.secrets.client": (CLAIM, "other"),
    "auth.tokens.secretName": (GPUS, "other"),
    "auth.tokens.key": (GPUS, "other"),
    "auth.testToken.secretName": (GPUS, "other"),
    "auth.testToken.key": (GPUS, "other"),
    "networkPolicy.enabled": (MINIMAL, False),
    "networkPolicy.clients": (MINIMAL, []),
    "networkPolicy.metrics": (MONITORING, [{"podSelector": {}}]),
    "monitoring.serviceMonitor.enabled": (MINIMAL, True),
    "monitoring.serviceMonitor.interval": (MONITORING, "7s"),
    "monitoring.serviceMonitor.labels": (MONITORING, {"release": "other"}),
    "monitoring.rules.enabled": (MINIMAL, True),
    "monitoring.rules.labels": (MONITORING, {"release": "other"}),
    "monitoring.rules.runbookUrl": (MONITORING, "other"),
    "monitoring.rules.queuedRequests": (MONITORING, 7),
    "monitoring.rules.ttftSeconds": (MONITORING, 7.5),
    "monitoring.dashboard.enabled": (MINIMAL, True),
    "monitoring.dashboard.labels": (MONITORING, {"other": "1"}),
    "listenAddress": (MINIMAL, "::"),
    "podSecurityContext": (MINIMAL, PERSON),
    "serviceAccountName": (MINIMAL, "other"),
    "standby.enabled": (MINIMAL, False),
    "scheduler.image": (MINIMAL, "example.com/paceline-scheduler@sha256:0"),
    "scheduler.shutdownTimeoutSeconds": (MINIMAL, 7),
    "scheduler.preStopSeconds": (MINIMAL, 0),
    "scheduler.args": (MINIMAL, ["--log-level=debug"]),
    "scheduler.env": (MINIMAL, [{"name": "A", "value": "b"}]),
    "scheduler.resources": (MINIMAL, {"limits": {"cpu": 3}}),
    "scheduler.nodeSelector": (MINIMAL, {"a": "b"}),
    "scheduler.tolerations": (MINIMAL, [{"operator": "Exists"}]),
    "scheduler.zones": (MINIMAL, ["a"]),
    "scheduler.priorityClassName": (MINIMAL, "other"),
    "pools": (MINIMAL, {"large": {"model": {"name": "org/name"}}}),
    "poolDefaults.replicas": (MINIMAL, 3),
    "poolDefaults.autoscaling.enabled": (MINIMAL, True),
    "poolDefaults.autoscaling.minReplicas": (MINIMAL, 2),
    "poolDefaults.autoscaling.maxReplicas": (MINIMAL, 7),
    "poolDefaults.autoscaling.queuedRequests": (MINIMAL, 7),
    "poolDefaults.autoscaling.runningRequests": (MINIMAL, 7),
    "poolDefaults.autoscaling.serverAddress": (MINIMAL, "https://other"),
    "poolDefaults.image": (MINIMAL, "other"),
    "poolDefaults.model.name": (MINIMAL, "org/name"),
    "poolDefaults.model.revision": (MINIMAL, "v1"),
    "poolDefaults.model.servedName": (MINIMAL, "other"),
    "poolDefaults.model.claimName": (MINIMAL, "other"),
    "poolDefaults.model.hostPath": (MINIMAL, "/other"),
    "poolDefaults.model.init": (MINIMAL, {"image": "other"}),
    "poolDefaults.model.tokenSecret": (MINIMAL, {"name": "a", "key": "b"}),
    "poolDefaults.gpu.count": (MINIMAL, 1),
    "poolDefaults.gpu.resource": (GPUS, "amd.com/gpu"),
    "poolDefaults.gpu.memoryUtilization": (GPUS, 0.5),
    "poolDefaults.runtimeClassName": (MINIMAL, "nvidia"),
    "poolDefaults.cache.persistent": (MINIMAL, False),
    "poolDefaults.cache.size": (MINIMAL, "3Gi"),
    "poolDefaults.cache.storageClassName": (MINIMAL, "fast"),
    "poolDefaults.startupBudgetSeconds": (MINIMAL, 100),
    "poolDefaults.shutdownTimeoutSeconds": (MINIMAL, 7),
    "poolDefaults.args": (MINIMAL, ["--max-num-seqs=4"]),
    "poolDefaults.env": (MINIMAL, [{"name": "A", "value": "b"}]),
    "poolDefaults.resources": (MINIMAL, {"limits": {"cpu": 3}}),
    "poolDefaults.nodeSelector": (MINIMAL, {"a": "b"}),
    "poolDefaults.tolerations": (MINIMAL, [{"operator": "Exists"}]),
    "poolDefaults.zones": (MINIMAL, ["a"]),
    "poolDefaults.priorityClassName": (MINIMAL, "other"),
    "extraObjects": (MINIMAL, [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}]),
}
# What has to be set beside it.
BESIDE = {
    "tls.source": {"auth.tokens.secretName": ""},
    **{f"poolDefaults.autoscaling.{name}": {"poolDefaults.autoscaling.enabled": True} for name in SCALING},
    "poolDefaults.model.name": {"poolDefaults.model.name": "a", "pools": {"other": {}}},
}


def leaves(schema, path=""):
    """The paths at which the schema stops to say which names there are."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    named = schema.get("properties", {})
    if not named or "dependencies" in schema or path.endswith((".init", ".issuerRef")):
        return {path}
    return set().union(*(leaves(part, f"{path}.{name}".lstrip(".")) for name, part in named.items()))


def value_at(path):
    """The default of a value."""
    found = VALUES
    for name in path.split("."):
        found = found[name]
    return found


def documented():
    """The paths in values.yaml with a comment as helm-docs reads it, in the lines right above."""
    paths, stack, comment = set(), [], False
    for line in TEXT.splitlines():
        match = re.match(r"( *)([A-Za-z]\w*):", line)
        if match:
            stack = [*stack[: len(match[1]) // 2], match[2]]
            paths |= {".".join(stack)} if comment else set()
        comment = "# -- " in line or (comment and line.lstrip().startswith("#"))
    return paths


def test_the_schema_knows_the_values_that_there_are():
    """No more, and no fewer: whatever is misspelt is refused."""
    for path in leaves(SCHEMA) - {"global"}:
        value_at(path)
    assert leaves(SCHEMA) - {"global"} == set(OTHERS)


def test_every_value_is_documented_for_helm_docs():
    assert set(OTHERS) - documented() == set()


@pytest.mark.parametrize("path", OTHERS)
def test_no_value_does_nothing(path):
    file, other = OTHERS[path]
    beside = BESIDE.get(path, {})
    assert render(file, beside | {path: other}) != render(file, beside)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (MINIMAL, {"tls.source": ""}, "choose tls.source: certManager, secrets, or none"),
        (MINIMAL, {"tls.source": "letsencrypt"}, "tls"),
        (MINIMAL, {"tls.source": "certManager"}, "set tls.certManager.issuerRef.name"),
        (MINIMAL, {"tls.source": "secrets"}, "set tls.secrets.scheduler"),
        (CLAIM, {"tls.secrets.client": ""}, "set tls.secrets.client"),
        (MINIMAL, {"auth.tokens.secretName": "a"}, "tokens must not travel in plaintext"),
        (CLAIM, {"auth.tokens.secretName": "a"}, "set auth.testToken.secretName too"),
        (MINIMAL, {"pools": {}}, "name at least one pool of executors"),
        (MINIMAL, {"pools.small.model.name": ""}, "pools.small: set model.name"),
        (MINIMAL, {"pools.small.args": ["--runner=simulated"]}, "pools.small: set model.name, or --runner=simulated"),
        (MINIMAL, {"pools.small.model.claimName": "a", "pools.small.model.hostPath": "/a"}, "comes from one place"),
        (CLAIM, {"pools.mistral.model.revision": "main"}, "are for models of the hub"),
        (CLAIM, {"pools.mistral.model.name": "/models/a"}, "a path inside the volume"),
        (CLAIM, {"pools.mistral.model.name": "../a"}, "a path inside the volume"),
        (MINIMAL, {"pools.other.model.name": "a"}, "there are several pools: set model.servedName"),
        (MINIMAL, {"pools.small.gpu.memoryUtilization": 0.5}, "needs gpu.count 1"),
        (MINIMAL, {"pools.small": None}, "small"),
        (MINIMAL, {"pools.small.gpu.count": 2}, "count"),
        (MINIMAL, {"pools.small.gpu.memoryUtilization": 90}, "memoryUtilization"),
        (MINIMAL, {"pools.small.args": ["--port=1"]}, "pools.small.args: the chart sets --port=1 itself"),
        (MINIMAL, {"scheduler.args": ["--metrics-port=off"]}, "the chart sets --metrics-port=off itself"),
        (GPUS, {"pools.slice.args": ["--runner=cpu"]}, "pools.slice.args: the chart sets --runner=cpu itself"),
        (MINIMAL, {"pools.small.args": ["--max-num-seqs", "4"]}, "args"),
        (MINIMAL, {"scheduler.args": ["--takeover", "--standby"]}, "scheduler.args: the chart sets --standby itself"),
        (MINIMAL, {"scheduler.replicas": 3}, "replicas"),
        (MINIMAL, {"scheduler.preStopSeconds": 10}, "preStopSeconds"),
        (MINIMAL, {"scheduler.shutdownTimeoutSeconds": "30s"}, "shutdownTimeoutSeconds"),
        (MINIMAL, {"pools.executors.model.name": "a"}, "pools.executors: another object has this name"),
        (MINIMAL, {"pools.Large.model.name": "a"}, "Large"),
        (MINIMAL, {"pools.small.startupBudgetSeconds": 1}, "startupBudgetSeconds"),
        (MINIMAL, {"pools.small.cache.size": "20"}, "size"),
        (MINIMAL, {"pools.small.model.tokenSecret": {"name": "a"}}, "key"),
        (MINIMAL, {"pools.small.model.init": {"command": ["a"]}}, "image"),
        (MINIMAL, {"pools.small.model.init": {"image": "a", "securityContext": {}}}, "securityContext"),
        (MINIMAL, {"networkPolicy.metrics": []}, "metrics"),
        (MINIMAL, {"monitoring.serviceMonitor.interval": "2m"}, "interval"),
        (MINIMAL, {"monitoring.rules.ttftSeconds": 2560}, "ttftSeconds"),
        (MINIMAL, {"monitoring.rules.queuedRequests": -1}, "queuedRequests"),
        (MINIMAL, {"monitoring.rules.runbookUrl": ""}, "runbookUrl"),
        (MINIMAL, {"monitoring.dashboard.labels": {"grafana_dashboard": 1}}, "grafana_dashboard"),
        (MINIMAL, {"monitoring.enabled": True}, "enabled"),
        (MINIMAL, {"pools.small.autoscaling": {"enabled": True, "minReplicas": 5}}, "minReplicas is above"),
        (MINIMAL, {"pools.small.autoscaling.minReplicas": 0}, "minReplicas"),
        (MINIMAL, {"pools.small.autoscaling.serverAddress": "prometheus:9090"}, "serverAddress"),
        (MONITORING, {"pools.fixed.model.servedName": "qwen3-4b"}, "pools.elastic: pools.fixed has the same model"),
        (MINIMAL, {"listenAddress": "127.0.0.1"}, "listenAddress"),
        (MINIMAL, {"fullnameOverride": "a" * 31}, "fullnameOverride"),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_cannot_be_meant_is_refused(file, values, message, program):
    with pytest.raises(HelmError) as error:
        render(file, values, program=program)
    assert message in str(error.value)


def test_a_release_with_a_long_name_says_what_to_set():
    """Kubernetes would cut the names of its objects, or refuse their labels."""
    with pytest.raises(HelmError, match="has more than 30 characters: set fullnameOverride"):
        helm("template", "a" * 40, CHART, "-f", MINIMAL)


def test_a_kubernetes_that_is_too_old_is_refused():
    with pytest.raises(HelmError, match=r"incompatible with Kubernetes v1\.28"):
        helm("template", "rel", CHART, "-f", MINIMAL, "--kube-version", "1.28.0")


def test_nothing_is_installed_by_chance():
    with pytest.raises(HelmError, match=r"choose tls.source"):
        helm("template", "rel", CHART)


@pytest.mark.skipif("helm4" not in PROGRAMS, reason="helm 3 renders notes beside a cluster only")
@pytest.mark.parametrize(
    ("file", "said", "unsaid"),
    [
        (MINIMAL, ["grpcurl -plaintext -d", "in plaintext and without tokens. Only network policies"], ["-cacert"]),
        (GPUS, ['client/ca.crt -H "authorization: Bearer', "get secret rel-paceline-operator-tls"], ["-plaintext"]),
        (CLAIM, ["-cert client/tls.crt -key client", "get secret client-tls", "-cert operator/tls"], ["Bearer"]),
        (CHART / "ci" / "one-scheduler.yaml", ["Whoever reaches the pods may call them"], ["STANDBY"]),
    ],
    ids=lambda part: part.stem if hasattr(part, "stem") else "",
)
def test_the_notes_say_how_to_call_what_was_installed(file, said, unsaid):
    notes = helm("install", "rel", CHART, "-n", "models", "--dry-run=client", "-f", file, program="helm4")
    notes = " ".join(notes.partition("NOTES:")[2].split())
    for part in ["port-forward deployment/", "localhost:50051 paceline.v1.InferenceService/Generate", *said]:
        assert part in notes
    for part in unsaid:
        assert part not in notes
