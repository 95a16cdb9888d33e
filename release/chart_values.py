"""The values of the Helm chart: each with its default, what it may be, and one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One value."""

    default: Any
    schema: Json
    sentence: str


Group = Mapping[str, "Value | Group"]

_FLAG: Json = {"type": "boolean"}
_TEXT: Json = {"type": "string", "minLength": 1}
_LEVEL: Json = {"enum": ["debug", "info", "warning", "error"]}
_REPLICAS: Json = {"type": "integer", "minimum": 1}
_IMAGE: Json = {"type": "string", "pattern": "^[^\\s:]+(:[0-9]+/[^\\s:]+)?([:@][^\\s]+)$"}


def _resources(cpu: str, memory: str, limit: str = "") -> Value:
    default: Json = {"requests": {"cpu": cpu, "memory": memory}}
    if limit:
        default["limits"] = {"memory": limit}
    return Value(default, {"type": "object"}, "what its pods request and may use")


VALUES: Group = {
    "images": {
        "serve": Value("", _IMAGE, "kvplace serve, and what keeps the certificates"),
        "hook": Value("", _IMAGE, "the sidecar of every VM with kvplace's annotations; nodes pull it"),
        "agent": Value("", _IMAGE, "the pod on every node"),
        "scheduler": Value(
            "", _IMAGE, "kube-scheduler, not newer than your API server and at most one minor release older"
        ),
    },
    "serve": {
        "replicas": Value(2, _REPLICAS, "all of them serve"),
        "strategy": Value(
            "pack", {"enum": ["pack", "spread", "balance"]}, "between nodes that hold a VM equally well"
        ),
        "mode": Value(
            "decide", {"enum": ["decide", "advise"]}, "whether Filter answers with the one best node"
        ),
        "nominateFromNodes": Value(
            1000, {"type": "integer", "minimum": 0}, "least number of nodes for nominations; 0: never"
        ),
        "makeRoom": Value(
            "off",
            {"enum": ["off", False, "on-request", "automatic", "nodes"]},
            "whether VMs make room for others",
        ),
        "sidecar": Value(
            "annotation",
            {"enum": ["annotation", "plugin"]},
            "how KubeVirt calls the hook; plugin: through a Plugin of KubeVirt 1.9",
        ),
        "schedulerName": Value(
            None, {"type": ["string", "null"]}, "of VMs that name none; null: kvplace's own or the main one"
        ),
        "admissionClientNamespace": Value(
            "kube-system", _TEXT, "API servers may call the webhooks through its pods; other pods are refused"
        ),
        "logLevel": Value("info", _LEVEL, "debug, info, warning or error"),
        "resources": _resources("250m", "256Mi", "1Gi"),
    },
    "scheduler": {
        "enabled": Value(True, _FLAG, "a second kube-scheduler; false: the cluster's main one calls kvplace"),
        "replicas": Value(2, _REPLICAS, "one schedules, the others wait"),
        "resources": _resources("100m", "128Mi"),
    },
    "agent": {
        "enabled": Value(True, _FLAG, "false: no agent; nodes are described by hand"),
        "reservedCpus": Value(
            "",
            {"type": "string", "pattern": "^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$"},
            "CPUs that stay with the host on every node; empty: those of the kubelet",
        ),
        "enforcement": Value(
            "auto",
            {"enum": ["auto", "nri", "cgroup", "none"]},
            "how containers are kept off the CPUs of others",
        ),
        "nodeSelector": Value(
            {"kubernetes.io/os": "linux"},
            {"type": "object", "additionalProperties": {"type": "string"}},
            "the nodes that it runs on",
        ),
        "logLevel": Value("info", _LEVEL, "debug, info, warning or error"),
        "resources": _resources("20m", "64Mi", "256Mi"),
    },
    "draDriverCpu": {
        "enabled": Value(
            False,
            _FLAG,
            "experimental: dra-driver-cpu sets the cpusets on nodes labelled kvplace.io/dra-driver-cpu=true",
        ),
    },
    "keeper": {
        "resources": _resources("10m", "64Mi", "256Mi"),
    },
    "certificates": Value(
        "kvplace", {"enum": ["kvplace", "cert-manager"]}, "the program that makes and renews them"
    ),
    "priorityClassNames": {
        "controlPlane": Value("system-cluster-critical", _TEXT, "of all pods but the agent's"),
        "agent": Value("system-node-critical", _TEXT, "of the agent's pods"),
    },
    "apiServerPorts": Value(
        [443, 6443],
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 65535}},
        "that network policies let kvplace call: of the Service, and of the API server itself",
    ),
    "monitoring": {
        "enabled": Value(
            False, _FLAG, "alerts and scrape targets for the Prometheus Operator, and a Grafana dashboard"
        ),
        "runbookUrl": Value(
            "docs/alerts.md", _TEXT, "URL of your copy of docs/alerts.md: the alerts link to its sections"
        ),
    },
}


def schema_of(values: Group) -> Json:
    """Return the JSON Schema that Helm checks an operator's values with."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_schema(values)}


def values_text(values: Group, images: Mapping[str, str], indent: str = "") -> str:
    """Write values.yaml with each sentence above its value; `images` are those of the release."""
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, Value):
            default = images.get(name, value.default) if value.schema is _IMAGE else value.default
            lines += [f"{indent}# {value.sentence}", f"{indent}{name}: {json.dumps(default)}"]
        else:
            lines += [f"{indent}{name}:", values_text(value, images, f"{indent}  ").rstrip("\n")]
    return "\n".join(lines) + "\n"


def _schema(values: Group) -> Json:
    properties: Json = {}
    for name, value in values.items():
        properties[name] = (
            {"description": value.sentence, **value.schema} if isinstance(value, Value) else _schema(value)
        )
    return {"type": "object", "additionalProperties": False, "properties": properties}
