"""Strict schemas: of Kubernetes as each version publishes them, and of the cert-manager fields that the chart uses."""

from typing import Any

import jsonschema
import kubernetes_validate

from chart_checks.helm import Object

KUBERNETES_VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))

_NAME = {"type": "string", "minLength": 1}
_NAMES = {"type": "array", "items": _NAME, "minItems": 1}


def _fields(required: list[str], **properties: object) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


CERTIFICATE = _fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "cert-manager.io/v1"},
    kind={"const": "Certificate"},
    metadata=_fields(["name"], name=_NAME, labels={"type": "object"}),
    spec=_fields(
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
    ),
)
"""Of https://cert-manager.io/docs/reference/api-docs/#cert-manager.io/v1.Certificate, what the chart uses."""


def problem_of(found: Object, version: str) -> str:
    """What a Kubernetes of this version would refuse of an object; empty if nothing."""
    try:
        if found["apiVersion"].startswith("cert-manager.io/"):
            jsonschema.validate(found, CERTIFICATE)
        else:
            kubernetes_validate.validate(found, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return f"{found['kind']} {found['metadata']['name']} on {version}: {error.message}"
    return ""
