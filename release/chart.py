"""The Helm chart of a release: the objects of the manifests, with values where an overlay would patch.

It is made from what kustomize renders, so the two cannot drift apart: placeholders are put into the objects,
the objects are written as text, and the placeholders become pieces of template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from release.chart_values import VALUES, schema_of, values_text
from release.images import ReleasedImage

Json = dict[str, Any]
Render = Callable[[Path], list[Json]]
"""What `kubectl kustomize` makes of a folder."""

_HASH = re.compile(r"-[0-9a-z]{10}$")
_HASH_IN_REFERENCE = re.compile(
    r'("(?:kvplace-settings|kvplace-agent-settings|kvplace-scheduler-configuration))-[0-9a-z]{10}(?=")'
)
SETTINGS = "checksum/settings"
"""Annotation on pods that changes with their settings."""
_CERT_MANAGER = "cert-manager.io/v1"
_OWN = 'eq .Values.certificates "kvplace"'
_CALL_THE_API_SERVER = ("names-and-api-server", "kvplace-agent", "kvplace-certificates")
"""The network policies with a last rule that opens the ports of the API server."""
_DRA_DRIVER_CPU = ".Values.draDriverCpu.enabled"
_OF_DRA_DRIVER_CPU = (
    "kvplace-agent-dra-driver-cpu",
    "kvplace-serve-dra-driver-cpu",
    "resource-claims.kvplace.io",
)
_CONDITIONS: tuple[tuple[Callable[[Json], bool], str], ...] = (
    (lambda entry: _component(entry) == "agent", ".Values.agent.enabled"),
    (lambda entry: _component(entry) == "scheduler", ".Values.scheduler.enabled"),
    (
        lambda entry: entry["metadata"]["name"] == "kvplace-extender-from-anywhere",
        "not .Values.scheduler.enabled",
    ),
    (lambda entry: entry["kind"] == "Plugin", 'eq .Values.serve.sidecar "plugin"'),
    (
        lambda entry: entry["metadata"]["name"] in ("kvplace-serve-migrations", "migrations.kvplace.io"),
        'eq (toString .Values.serve.makeRoom) "nodes"',
    ),
    (lambda entry: entry["metadata"]["name"] in _OF_DRA_DRIVER_CPU, _DRA_DRIVER_CPU),
    (lambda entry: entry["metadata"]["name"] == "kvplace-certificates", _OWN),
    (lambda entry: entry["apiVersion"] == _CERT_MANAGER, f"not ({_OWN})"),
    (
        lambda entry: (
            entry["apiVersion"].startswith("monitoring.") or entry["metadata"]["name"] == "kvplace-dashboard"
        ),
        ".Values.monitoring.enabled",
    ),
)
_MAKE_ROOM = 'eq (toString .Values.serve.makeRoom) "false" | ternary "off" .Values.serve.makeRoom'
"""YAML takes the word off for false."""
_DEFAULT_NAME = 'ternary "kvplace-scheduler" "default-scheduler" .Values.scheduler.enabled'
_SCHEDULER_NAME = f".Values.serve.schedulerName | default ({_DEFAULT_NAME})"


def write_chart(
    folder: Path,
    version: str,
    images: Iterable[ReleasedImage],
    render: Render,
    manifests: Path,
) -> None:
    """Write the chart's files into a new folder; `manifests` is a copy of them that may be added to."""
    templates = folder / "templates"
    templates.mkdir(parents=True)
    references = {image.name: f"{image.repository}@{image.digest}" for image in images}
    for number, entry in enumerate(_all_objects(render, manifests)):
        if (entry["kind"], entry["metadata"]["name"]) == ("Deployment", "kvplace-scheduler"):
            references["scheduler"] = entry["spec"]["template"]["spec"]["containers"][0]["image"]
        name = f"{number:02}-{entry['kind'].lower()}-{entry['metadata']['name']}.yaml"
        (templates / name).write_text(_template(entry))
    (folder / "values.yaml").write_text(values_text(VALUES, references))
    (folder / "values.schema.json").write_text(json.dumps(schema_of(VALUES), indent=2) + "\n")
    chart = {
        "apiVersion": "v2",
        "name": "kvplace",
        "description": "Gives KubeVirt VMs the right physical CPU cores",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.31.0-0",
    }
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart, sort_keys=False))


def _all_objects(render: Render, manifests: Path) -> Iterable[Json]:
    """Return every object that some values ask for, each once."""
    found: dict[tuple[str, str, str], Json] = {}
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../default"],
        "components": [
            "../dra-driver-cpu",  # first: it labels what others would add
            "../plugin",
            "../moves-between-nodes",
            "../main-scheduler",
            "../monitoring",
        ],
    }
    folder = manifests / "everything-else"
    folder.mkdir(exist_ok=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    for part in ("default", "cert-manager", folder.name):
        for entry in render(manifests / part):
            metadata = entry["metadata"]
            if entry["kind"] == "ConfigMap":
                metadata["name"] = _HASH.sub("", metadata["name"])
            first = found.setdefault((entry["kind"], metadata.get("namespace", ""), metadata["name"]), entry)
            if entry["kind"] == "DaemonSet" and "affinity" in entry["spec"]["template"]["spec"]:
                first["spec"]["template"]["spec"]["affinity"] = entry["spec"]["template"]["spec"]["affinity"]
    return found.values()


def _template(entry: Json) -> str:
    """Write an object as a template; braces that are its own stay what they are."""
    entry = json.loads(_HASH_IN_REFERENCE.sub(r"\1", json.dumps(entry)))
    placeholders = _Placeholders()
    _put_values(entry, placeholders)
    text = yaml.safe_dump(entry, sort_keys=False, width=1000, allow_unicode=True)
    text = placeholders.filled(text.replace("{{", '{{ "{{" }}'))
    conditions = [f"({condition})" for matches, condition in _CONDITIONS if matches(entry)]
    return f"{{{{- if and {' '.join(conditions)} }}}}\n{text}{{{{- end }}}}\n" if conditions else text


class _Placeholders:
    """Words that YAML leaves as they are, each for a piece of template."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def piece(self, text: str) -> str:
        """Return the word that stands for a piece of template."""
        self._pieces.append(text)
        return f"placeholder-{len(self._pieces) - 1}-of-the-chart"

    def json(self, expression: str) -> str:
        """Return the word for a value of any type: JSON is YAML."""
        return self.piece(f"{{{{ toJson ({expression}) }}}}")

    def text(self, expression: str) -> str:
        """Return the word for a value that has to be a string."""
        return self.json(f"toString ({expression})")

    def field_if(self, condition: str, name: str, value: Json) -> Json:
        """Return what to add to an object for a field that it has only on a condition."""
        field = self.piece(f"{{{{ if {condition} }}}}{name}: {json.dumps(value)}{{{{ end }}}}")
        return {field: None}

    def filled(self, text: str) -> str:
        """Put the pieces in."""
        return re.sub(
            r"placeholder-(\d+)-of-the-chart(: null)?", lambda found: self._pieces[int(found[1])], text
        )


def _put_values(entry: Json, put: _Placeholders) -> None:
    kind, name = entry["kind"], entry["metadata"]["name"]
    if kind in ("Deployment", "DaemonSet"):
        _put_pods(entry, name.removeprefix("kvplace-"), put)
    elif kind == "ConfigMap" and name == "kvplace-settings":
        entry["data"] |= {
            "STRATEGY": put.text(".Values.serve.strategy"),
            "MODE": put.text(".Values.serve.mode"),
            "NOMINATE_FROM_NODES": put.text("int .Values.serve.nominateFromNodes"),
            "MAKE_ROOM": put.text(_MAKE_ROOM),
            "SIDECAR": put.text(".Values.serve.sidecar"),
            "SIDECAR_IMAGE": put.text(".Values.images.hook"),
            "SCHEDULER_NAME": put.text(_SCHEDULER_NAME),
            "ADMISSION_CLIENT_NAMESPACE": put.text(".Values.serve.admissionClientNamespace"),
            "LOG_LEVEL": put.text(".Values.serve.logLevel"),
        }
    elif kind == "ConfigMap" and name == "kvplace-agent-settings":
        entry["data"] |= {
            "RESERVED_CPUS": put.text(".Values.agent.reservedCpus"),
            "ENFORCEMENT": put.text(".Values.agent.enforcement"),
            "LOG_LEVEL": put.text(".Values.agent.logLevel"),
        }
    elif kind == "NetworkPolicy" and name in _CALL_THE_API_SERVER:
        entry["spec"]["egress"][-1]["ports"] = put.piece(
            "[{{ range $i, $port := .Values.apiServerPorts }}{{ if $i }}, {{ end }}"
            "{port: {{ int $port }}}{{ end }}]"
        )
    elif kind == "PrometheusRule":
        for rule in (rule for group in entry["spec"]["groups"] for rule in group["rules"]):
            _, _, section = rule["annotations"]["runbook_url"].partition("#")
            link = f'printf "%s#{section}" .Values.monitoring.runbookUrl'
            rule["annotations"]["runbook_url"] = put.json(link)
    elif kind.endswith("WebhookConfiguration"):
        by_cert_manager = 'dict "cert-manager.io/inject-ca-from" "kvplace-system/kvplace-serve"'
        entry["metadata"]["annotations"] = put.json(f"ternary dict ({by_cert_manager}) ({_OWN})")


def _put_pods(entry: Json, part: str, put: _Placeholders) -> None:
    spec = entry["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    is_of_driver = part == "agent-dra-driver-cpu"
    part = "agent" if is_of_driver else part
    group = "keeper" if part == "certificates" else part
    container["image"] = put.json(f".Values.images.{'serve' if part == 'certificates' else part}")
    container["resources"] = put.json(f".Values.{group}.resources")
    if part == "agent":
        spec["priorityClassName"] = put.json(".Values.priorityClassNames.agent")
        label = 'dict "kvplace.io/dra-driver-cpu" "true"' if is_of_driver else "dict"
        spec["nodeSelector"] = put.json(f"merge ({label}) .Values.agent.nodeSelector")
        if not is_of_driver:
            spec |= put.field_if(_DRA_DRIVER_CPU, "affinity", spec.pop("affinity"))
    else:
        spec["priorityClassName"] = put.json(".Values.priorityClassNames.controlPlane")
    if part in ("serve", "scheduler"):
        entry["spec"]["replicas"] = put.json(f"int .Values.{part}.replicas")
    if part in ("serve", "agent"):
        # Pods are replaced when their settings change: kustomize has a hash in the ConfigMap's name for that.
        settings = f"list .Values.{part} .Values.images.hook .Values.scheduler.enabled"
        entry["spec"]["template"]["metadata"]["annotations"] = {
            SETTINGS: put.json(f"sha256sum (toJson ({settings}))")
        }


def _component(entry: Json) -> str:
    return str(entry["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))
