"""Strict schemas: of Kubernetes as each version publishes them, of custom resources the fields that the chart uses."""

from typing import Any

import jsonschema
import kubernetes_validate

from chart_checks.helm import Object, part_of, pod_spec

KUBERNETES_VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))

_NAME = {"type": "string", "minLength": 1}
_NAMES = {"type": "array", "items": _NAME, "minItems": 1}


def _fields(required: list[str], **properties: object) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = _fields(["name"], name=_NAME, labels=_TEXTS)
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|[smhd]))+$"}


def _object(api_version: str, kind: str, required: list[str], **spec: object) -> dict[str, Any]:
    return _fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=_fields(required, **spec),
    )


CERTIFICATE = _object(
    "cert-manager.io/v1",
    "Certificate",
    ["secretName", "issuerRef"],
    secretName=_NAME,
    commonName={"type": "string", "maxLength": 64},
    uris={"type": "array", "items": {"type": "string", "pattern": "^[a-z]+://"}},
    dnsNames=_NAMES,
    usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
    privateKey=_fields(
        [],
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        size={"enum": [256, 384, 521, 2048, 4096, 8192]},
        rotationPolicy={"enum": ["Never", "Always"]},
    ),
    issuerRef=_fields(["name"], name=_NAME, kind=_NAME, group=_NAME),
)
"""Of https://cert-manager.io/docs/reference/api-docs/#cert-manager.io/v1.Certificate, what the chart uses."""

SERVICE_MONITOR = _object(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    ["selector", "endpoints"],
    selector=_fields(["matchLabels"], matchLabels=_TEXTS),
    endpoints={"type": "array", "minItems": 1, "items": _fields(["port"], port=_NAME, interval=_DURATION)},
)
_ALERT = _fields(["alert", "expr"], alert=_NAME, expr=_NAME, labels=_TEXTS, annotations=_TEXTS, **{"for": _DURATION})
PROMETHEUS_RULE = _object(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    ["groups"],
    groups={"type": "array", "items": _fields(["name"], name=_NAME, rules={"type": "array", "items": _ALERT})},
)
"""Both of https://prometheus-operator.dev/docs/api-reference/api, what the chart uses."""

_TRIGGER = _fields(
    ["type", "metadata"],
    type={"const": "prometheus"},
    name=_NAME,
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    metadata=_fields(
        ["serverAddress", "query", "threshold"],
        serverAddress=_NAME,
        query=_NAME,
        threshold={"type": "string", "pattern": "^[0-9.]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = _object(
    "keda.sh/v1alpha1",
    "ScaledObject",
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=_fields(["name"], apiVersion=_NAME, kind=_NAME, name=_NAME),
    minReplicaCount={"type": "integer"},
    maxReplicaCount={"type": "integer"},
    triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
)
"""Of https://keda.sh/docs/latest/reference/scaledobject-spec and /scalers/prometheus, what the chart uses."""

_POD_TEMPLATE = _fields(["metadata", "spec"], metadata=_fields([], labels=_TEXTS, annotations=_TEXTS), spec={})
_CLAIM = _fields(["metadata", "spec"], metadata=_METADATA, spec={"type": "object"})
_KEPT = {"enum": ["Retain", "Delete"]}
LEADER_WORKER_SET = _object(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    ["leaderWorkerTemplate"],
    replicas={"type": "integer"},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    leaderWorkerTemplate=_fields(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
        volumeClaimTemplates={"type": "array", "items": _CLAIM},
        persistentVolumeClaimRetentionPolicy=_fields([], whenDeleted=_KEPT, whenScaled=_KEPT),
    ),
)
"""Of https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1, what the chart uses. What pods are Kubernetes says."""

HTTP_ROUTE = _object(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    ["parentRefs", "rules"],
    parentRefs={
        "type": "array",
        "minItems": 1,
        "items": _fields(["name"], name=_NAME, namespace=_NAME, sectionName=_NAME),
    },
    hostnames=_NAMES,
    rules={
        "type": "array",
        "items": _fields(
            ["backendRefs"],
            backendRefs={"type": "array", "items": _fields(["name", "port"], name=_NAME, port={"type": "integer"})},
        ),
    },
)
"""Of https://gateway-api.sigs.k8s.io/reference/spec, what the chart uses."""

CUSTOM = {
    "gateway.networking.k8s.io": {"HTTPRoute": HTTP_ROUTE},
    "cert-manager.io": {"Certificate": CERTIFICATE},
    "monitoring.coreos.com": {"ServiceMonitor": SERVICE_MONITOR, "PrometheusRule": PROMETHEUS_RULE},
    "keda.sh": {"ScaledObject": SCALED_OBJECT},
    "leaderworkerset.x-k8s.io": {"LeaderWorkerSet": LEADER_WORKER_SET},
}


def _pods_of(found: Object) -> list[Object]:
    if found["kind"] != "LeaderWorkerSet":
        return []
    specs = (pod_spec(part_of(found, part)) for part in ("leader", "worker"))
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": found["metadata"], "spec": spec} for spec in specs]


def problem_of(found: Object, version: str) -> str:
    """What a Kubernetes of this version would refuse of an object; empty if nothing."""
    try:
        group = found["apiVersion"].partition("/")[0]
        if group in CUSTOM:
            jsonschema.validate(found, CUSTOM[group][found["kind"]])
            for pod in _pods_of(found):
                kubernetes_validate.validate(pod, version, strict=True)
        else:
            kubernetes_validate.validate(found, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return f"{found['kind']} {found['metadata']['name']} on {version}: {error.message}"
    return ""
