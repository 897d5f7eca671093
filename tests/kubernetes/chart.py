"""Renders the chart with Helm's own engine, and checks manifests against the published schemas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "docker" / "helm"
RELEASE, NAMESPACE = "r", "ns"
# The newest that kubernetes-validate has.
KUBERNETES = "1.37.0"
Manifest = dict[str, Any]

# InferencePool v1, written from https://gateway-api-inference-extension.sigs.k8s.io/reference/spec
INFERENCE_POOL: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "kind": {"const": "InferencePool"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "targetPorts", "endpointPickerRef"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                    "properties": {
                        "matchLabels": {
                            "type": "object",
                            "maxProperties": 64,
                            "additionalProperties": {
                                "type": "string",
                                "maxLength": 63,
                                "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
                            },
                        }
                    },
                },
                "targetPorts": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 8,
                    "uniqueItems": True,
                    "items": {"$ref": "#/$defs/port"},
                },
                "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
                "endpointPickerRef": {
                    "type": "object",
                    "additionalProperties": False,
                    # A Service, as here, must be named with a port.
                    "required": ["name", "port"],
                    "properties": {
                        "group": {"type": "string", "maxLength": 253},
                        "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                        "name": {"type": "string", "minLength": 1, "maxLength": 253},
                        "port": {"$ref": "#/$defs/port"},
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    },
                },
            },
        },
    },
    "$defs": {
        "port": {
            "type": "object",
            "additionalProperties": False,
            "required": ["number"],
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
        }
    },
}

LEAST: dict[str, Any] = {
    "model": {"name": "tiny", "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
    "links": {"tokenSecret": "links"},
    "access": {"keysSecret": "keys"},
}
POOL: dict[str, Any] = {
    "model": LEAST["model"],
    "routing": "llm-d",
    "access": {"insecure": True},
    "inferencePool": {"endpointPicker": {"name": "epp"}, "podLabels": {"llm-d.ai/guide": "foretoken"}},
    "kvEvents": {"enabled": True},
    "networkPolicy": {
        "clients": [{"podSelector": {"matchLabels": {"app": "envoy"}}}],
        "kvEventReaders": [{"podSelector": {"matchLabels": {"app": "epp"}}}],
    },
}
EAGLE = {"name": "eagle", "algorithm": "EAGLE3", "placement": "container", "path": "head", "args": ["--threads=1"]}
# Names of values that show all that the chart can do.
CASES: dict[str, dict[str, Any]] = {
    "least": LEAST,
    "everything": {
        "model": {**LEAST["model"], "path": "target"},
        "imagePullSecrets": [{"name": "registry"}],
        "drain": {"seconds": 100, "endpointsSeconds": 7},
        "links": {"tokenSecret": "links", "certificateSecret": "link-tls"},
        "access": {"keysSecret": "keys", "adminKeySecret": "admin", "tlsSecret": "tls", "clientCertificates": True},
        "gateway": {
            "args": ["--gateway-workers=2"],
            "autoscaling": {"enabled": True},
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "podAnnotations": {"prometheus.io/scrape": "true"},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        },
        "verifier": {
            "args": ["--max-running-requests=8"],
            "autoscaling": {"enabled": True, "selector": {"model_name": "tiny"}},
            "podAnnotations": {"a": "b"},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
        "drafters": [EAGLE, {"name": "ngram", "algorithm": "NGRAM", "placement": "container"}],
        "gpu": {"mode": "claim", "mps": True},
        "kvEvents": {"enabled": True},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "kvEventReaders": [{"podSelector": {}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        },
    },
    "a GPU of one container": {
        **LEAST,
        "gpu": {"mode": "container"},
        "drafters": [
            {"name": "eagle", "algorithm": "EAGLE3", "placement": "in-process", "path": "head"},
            {"name": "ngram", "algorithm": "NGRAM", "placement": "container"},
        ],
    },
    "no drafters, no guards": {
        **LEAST,
        "links": {"insecure": True},
        "access": {"insecure": True},
        "drafters": [],
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "pool": POOL,
    "pool on GPUs": {**POOL, "gpu": {"mode": "claim", "mps": True}, "drafters": [EAGLE]},
}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes``, in nested maps too."""
    result = copy.deepcopy(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def render(values: dict[str, Any]) -> list[Manifest]:
    """Return the manifests. Raises helm_python's errors."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def check_schema(manifest: Manifest) -> None:
    """Raise a validation error if the API would refuse or ignore a field."""
    import jsonschema
    import kubernetes_validate

    if manifest["kind"] == "InferencePool":
        jsonschema.validate(manifest, INFERENCE_POOL)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and pod template of each workload."""
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["metadata"]["labels"]["app.kubernetes.io/component"], manifest["spec"]["template"]


def containers(pod: Manifest) -> dict[str, Manifest]:
    """Return a pod's containers by name, sidecars and what runs before them among them."""
    spec = pod["spec"]
    return {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]
