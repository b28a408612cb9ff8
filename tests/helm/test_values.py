"""The chart's values: each is documented, has a schema and does something; what cannot be meant is refused in words."""

import functools
import itertools
import json
import operator
import re

import pytest
import yaml

from chart_checks.helm import CHART, PROGRAMS, HelmError, helm, lint, render, render_all

GPUS = CHART / "ci" / "gpu-cert-manager.yaml"
MINIMAL = CHART / "ci" / "minimal.yaml"
CLAIM = CHART / "ci" / "secrets-claim.yaml"
TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
GATEWAY = CHART / "ci" / "gateway.yaml"
MONITORING = CHART / "ci" / "monitoring.yaml"

each_program = pytest.mark.parametrize(
    "program", ["helm", *(pytest.param(program, marks=pytest.mark.slow) for program in PROGRAMS[1:])]
)

# The file that a value is set in, where that is not the smallest one, by the beginning of its path.
FILES = {
    "tls.source": GPUS,
    "tls.certManager": GPUS,
    "tls.secrets.gateway": GATEWAY,
    "tls.secrets": CLAIM,
    "auth": GPUS,
    "gateway": GATEWAY,
    "monitoring": MONITORING,
    "service": CLAIM,
    "poolDefaults.gpu.resource": GPUS,
    "poolDefaults.gpu.memoryUtilization": GPUS,
    "poolDefaults.gpu.nodes": CHART / "ci" / "two-nodes.yaml",
}
NODES = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]}}
# What has to be set beside it, by the beginning of its path.
BESIDE = {
    "tls.source": {"auth.tokens.secretName": ""},
    "gateway.enabled": {},
    "gateway.autoscaling.enabled": {"gateway.enabled": True},
    "gateway.replicas": {"gateway.autoscaling.enabled": False},
    "poolDefaults.autoscaling.enabled": {},
    "poolDefaults.autoscaling": {"poolDefaults.autoscaling.enabled": True},
    "poolDefaults.model.name": {"poolDefaults.model.name": "a", "pools": {"other": {}}},
}
# Another value that may be meant, by its path or the end of that, where the schema does not say enough to make one up.
OTHERS = {
    "image.pullSecrets": [{"name": "a"}],
    "tls.source": "none",
    "issuerRef": {"name": "other"},
    "gateway.clients": [{"namespaceSelector": {}}],
    "clients": [],
    "parentRefs": [{"name": "other"}],
    "hostnames": ["other.example.com"],
    "metrics": [{"podSelector": {}}],
    "interval": "7s",
    "labels": {"other": "1"},
    "ttftSeconds": 7.5,
    "podSecurityContext": {"runAsNonRoot": True, "runAsUser": 5},
    "pools": {"large": {"model": {"name": "org/name"}}},
    "gateway.autoscaling.minReplicas": 3,
    "minReplicas": 2,
    "serverAddress": "https://other",
    "hostPath": "/other",
    "init": {"image": "other"},
    "tokenSecret": {"name": "a", "key": "b"},
    "count": 1,
    "gpu.nodes": 4,
    "gpu.resource": "amd.com/gpu",
    "memoryUtilization": 0.5,
    "size": "3Gi",
    "startupBudgetSeconds": 100,
    "args": ["--log-level=debug"],
    "env": [{"name": "A", "value": "b"}],
    "resources": {"limits": {"cpu": 3}},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "zones": ["a"],
    "service.type": "NodePort",
    "affinity": {"podAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
    "podAnnotations": {"a": "b"},
    "annotations": {"a": "b"},
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}],
}


def leaves(schema, path=""):
    """The schemas of all values by their paths, as deep as they say which names there are."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    named = schema.get("properties", {})
    if not named or "dependencies" in schema or path.endswith((".init", ".issuerRef")):
        return {path: schema}
    deeper = [leaves(part, f"{path}.{name}".lstrip(".")) for name, part in named.items() if name != "global"]
    return dict(itertools.chain.from_iterable(part.items() for part in deeper))


LEAVES = leaves(SCHEMA)


def value_at(path):
    return functools.reduce(operator.getitem, path.split("."), VALUES)


def by_beginning(table, path, default):
    return next((found for beginning, found in table.items() if path.startswith(beginning)), default)


def another(path):
    """A value that may be meant, other than the default one."""
    for end, other in OTHERS.items():
        if f".{path}".endswith(f".{end}"):
            return other
    match LEAVES[path]:
        case {"enum": choices}:
            return next(choice for choice in choices if choice != value_at(path))
        case {"type": "boolean"}:
            return not value_at(path)
        case {"type": "integer"}:
            return 7
        case {"type": "string"}:
            return "other"
    raise AssertionError(f"say in OTHERS what {path} may be")


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
    """No more; were there fewer, helm would refuse the chart's own values. So whatever is misspelt is refused."""
    for path in LEAVES:
        value_at(path)


def test_every_value_is_documented_for_helm_docs():
    assert set(LEAVES) - documented() == set()


def changed(path):
    """A file, what has to be set beside a value, and another value."""
    # What is on in a file stands under `enabled`: that is turned on beside the smallest one.
    file = MINIMAL if path.endswith(".enabled") else by_beginning(FILES, path, MINIMAL)
    return file, by_beginning(BESIDE, path, {}), {path: another(path)}


def is_refused_by(check, file, values):
    try:
        check(file, values)
    except HelmError:
        return True
    return False


def test_no_value_does_nothing(tmp_path):
    changes = []
    for file, beside, change in map(changed, LEAVES):
        changes += [(file, beside), (file, beside | change)]
    alone, *pairs = render_all(tmp_path / "all", [(MINIMAL, {}), *changes])
    assert [found for found in yaml.safe_load_all(alone) if found] == render(MINIMAL)
    unchanged_and_changed = zip(LEAVES, pairs[::2], pairs[1::2], strict=True)
    assert [path for path, unchanged, changed in unchanged_and_changed if unchanged == changed] == []


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
        (MINIMAL, {"pools.small.gpu.memoryUtilization": 0.5}, "needs gpu.count"),
        (MINIMAL, {"pools.small": None}, "small"),
        (MINIMAL, {"pools.small.gpu.count": 65}, "count"),
        (GPUS, {"pools.slice.gpu.count": 2}, "parts of GPUs, nvidia.com/mig-1g.10gb, cannot share a model"),
        (GPUS, {"pools.large.gpu.resource": "nvidia.com/gpu.shared"}, "cannot share a model"),
        (
            GPUS,
            {"pools.large.resources.requests.cpu": "5500m"},
            "a rank for each of 4 GPUs and two CPUs more: ask for 6",
        ),
        (GPUS, {"pools.large.resources": {"limits": {"cpu": 4}}}, "ask for 6"),
        (GPUS, {"pools.large.args": ["--tensor-parallel-size=2"]}, "the chart sets --tensor-parallel-size=2 itself"),
        (GPUS, {"pools.large.gpu.nodes": 2, "pools.large.args": ["--node=0/1@a:1"]}, "sets --node=0/1@a:1 itself"),
        (GPUS, {"pools.large.gpu.nodes": 17}, "pools.large: an executor has 64 GPUs at most"),
        (GPUS, {"pools.large.gpu.nodes": 2, "networkPolicy.enabled": False}, "set networkPolicy.enabled"),
        (GPUS, {"pools.slice.gpu": {"count": 1, "resource": "a.b/mig-1", "nodes": 2}}, "cannot share a model"),
        (GPUS, {"pools.large.gpu.nodes": 2, "pools.large-0.model.servedName": "a"}, "makes an object of this name"),
        (MINIMAL, {"pools.small.gpu.nodes": 2}, "gpu.nodes needs gpu.count"),
        (
            MINIMAL,
            {"pools": {"external": {"model": {"name": "a"}, "gpu": {"count": 8, "nodes": 2}}}},
            "pools.external: a Service has this name",
        ),
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
        (MINIMAL, {"service.port": 80}, "a headless Service has the port of its pods"),
        (MINIMAL, {"service.type": "LoadBalancer"}, "keeps out who is outside: add an ipBlock"),
        (MINIMAL, {"service.type": "ExternalName"}, "service"),
        (MINIMAL, {"scheduler.zones": ["a"], "scheduler.affinity.nodeAffinity": NODES}, "scheduler: zones are"),
        (MINIMAL, {"poolDefaults.zones": ["a"], "pools.small.affinity.nodeAffinity": NODES}, "pools.small: zones are"),
        (MINIMAL, {"scheduler.affinity.nodeSelectorTerms": []}, "affinity"),
        (MINIMAL, {"poolDefaults.topologySpreadConstraints": [{"maxSkew": 1}]}, "topologyKey"),
        (MINIMAL, {"poolDefaults.podAnnotations": {"a": True}}, "podAnnotations"),
        (MINIMAL, {"extraObjects": [{"kind": "ConfigMap"}]}, "apiVersion"),
        (MINIMAL, {"monitoring.serviceMonitor.interval": "2m"}, "interval"),
        (MINIMAL, {"monitoring.rules.ttftSeconds": 2560}, "ttftSeconds"),
        (MINIMAL, {"monitoring.rules.queuedRequests": -1}, "queuedRequests"),
        (MINIMAL, {"monitoring.rules.runbookUrl": ""}, "runbookUrl"),
        (MINIMAL, {"monitoring.dashboard.labels": {"grafana_dashboard": 1}}, "grafana_dashboard"),
        (MINIMAL, {"monitoring.enabled": True}, "enabled"),
        (GATEWAY, {"tls.secrets.gateway": ""}, "there are gateways: set tls.secrets.gateway"),
        (GATEWAY, {"gateway.clients": []}, "gateway.clients keeps out who is outside"),
        (GATEWAY, {"gateway.autoscaling.minReplicas": 9}, "gateway: autoscaling.minReplicas is above"),
        (GATEWAY, {"gateway.resources.requests.cpu": ""}, "autoscaling needs a CPU in resources"),
        (GATEWAY, {"gateway.args": ["--port=1"]}, "gateway.args: the chart sets --port=1 itself"),
        (GATEWAY, {"gateway.zones": ["a"], "gateway.affinity.nodeAffinity": NODES}, "gateway: zones are"),
        (GATEWAY, {"pools.gateway.model.name": "a"}, "pools.gateway: another object has this name"),
        (MINIMAL, {"pools.small.autoscaling": {"enabled": True, "minReplicas": 5}}, "minReplicas is above"),
        (MINIMAL, {"pools.small.autoscaling.minReplicas": 0}, "minReplicas"),
        (MINIMAL, {"pools.small.autoscaling.serverAddress": "prometheus:9090"}, "serverAddress"),
        (MONITORING, {"pools.fixed.model.servedName": "qwen3-4b"}, "pools.elastic: pools.fixed has the same model"),
        (MINIMAL, {"listenAddress": "127.0.0.1"}, "listenAddress"),
        (MINIMAL, {"fullnameOverride": "a" * 31}, "fullnameOverride"),
    ],
)
@each_program
def test_what_cannot_be_meant_is_refused(file, values, message, program):
    for check in (render, lint):
        with pytest.raises(HelmError) as error:
            check(file, values, program=program)
        assert message in str(error.value)


@pytest.mark.slow
def test_lint_takes_what_can_be_rendered_and_no_more():
    """Another value for each that there is, and none for each value and section: null takes away what has a default."""
    cases = [(file, beside | change) for file, beside, change in map(changed, LEAVES)]
    beginnings = {part for path in LEAVES for part in itertools.accumulate(path.split("."), "{}.{}".format)}
    cases += [(MINIMAL, {path: None}) for path in sorted(beginnings)]
    verdicts = [(case, *(is_refused_by(check, *case) for check in (render, lint))) for case in cases]
    assert [case for case, is_refused, is_complained_of in verdicts if is_refused != is_complained_of] == []
    assert {is_refused for _, is_refused, _ in verdicts} == {True, False}


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


@pytest.mark.slow
@pytest.mark.skipif("helm4" not in PROGRAMS, reason="helm 3 renders notes beside a cluster only")
@pytest.mark.parametrize(
    ("file", "said", "unsaid"),
    [
        (MINIMAL, ["grpcurl -plaintext -d", "in plaintext and without tokens. Only network policies"], ["-cacert"]),
        (GPUS, ['client/ca.crt -H "authorization: Bearer', "get secret rel-paceline-operator-tls"], ["-plaintext"]),
        (
            CLAIM,
            [
                "-cert client/tls.crt -key client",
                "get secret client-tls",
                "-cert operator/tls",
                "service rel-paceline-external",
            ],
            ["Bearer"],
        ),
        (CHART / "ci" / "one-scheduler.yaml", ["Whoever reaches the pods may call them"], ["STANDBY", "several nodes"]),
        (CHART / "ci" / "two-nodes.yaml", ["pool large are on several nodes, and talk in plaintext"], ["pool small"]),
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
