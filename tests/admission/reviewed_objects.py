"""VMs, VMIs and pods as admission meets them, and an RFC 6902 of the tests' own to apply its answers with."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvplace.admission.edits import Admitted
from kvplace.admission.objects import AdmissionSettings
from kvplace.core.errors import Unavailable
from kvplace.core.request_json import PodRequest, read_pod_request

Json = dict[str, Any]

SETTINGS = AdmissionSettings(
    sidecar_image="registry.test/kvplace-hook:1", other_schedulers=("main-scheduler",)
)
OUR_ENTRY = {
    "image": "registry.test/kvplace-hook:1",
    "imagePullPolicy": "IfNotPresent",
    "command": ["kvplace-hook"],
    "args": ["serve"],
}
ASKS = {"cpu-set": "one-numa"}


def vmi(annotations: Mapping[str, str] | None = ASKS, name: str = "db", **domain: Any) -> Json:
    """Make a VMI of 4 vCPUs and 4Gi, or as in `domain`."""
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        | ({} if annotations is None else {"annotations": dict(annotations)}),
        "spec": {
            "domain": {"cpu": {"sockets": 1, "cores": 4, "threads": 1}, "memory": {"guest": "4Gi"}, **domain}
        },
    }


def vm(template_annotations: Mapping[str, str] | None = ASKS, **domain: Any) -> Json:
    """Make a VirtualMachine around the same VMI."""
    inner = vmi(template_annotations, **domain)
    metadata = {} if template_annotations is None else {"annotations": dict(template_annotations)}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "db", "namespace": "default"},
        "spec": {"runStrategy": "Always", "template": {"metadata": metadata, "spec": inner["spec"]}},
    }


def captured_pod(path: Path, annotations: Mapping[str, str] = ASKS, *, sidecar: bool = True) -> Json:
    """Read a captured virt-launcher pod, as if its VMI had these annotations and our hook sidecar.

    Captured pods without a hook stay so; `sidecar=False` leaves the others with the hook of another client.
    """
    pod: Json = json.loads(path.read_text())
    pod["metadata"].setdefault("annotations", {}).update(annotations)
    if sidecar:
        for container in pod["spec"]["containers"]:
            if container["name"].startswith("hook-sidecar-"):
                container |= {"image": OUR_ENTRY["image"], "command": ["kvplace-hook"], "args": ["serve"]}
    return pod


def vmi_of(pod: Json, **domain: Any) -> Json:
    """Make the VMI that owns a launcher pod."""
    owner = pod["metadata"]["ownerReferences"][0]
    made = vmi(pod["metadata"].get("annotations"), owner["name"], **domain)
    made["metadata"]["uid"] = owner["uid"]
    return made


def plain_pod(annotations: Mapping[str, str] | None = ASKS, *resources: Json, **spec: Any) -> Json:
    """Make a pod without a VM; a container for each of `resources`, one with 4 CPUs when there is none."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "solver"} | ({} if annotations is None else {"annotations": dict(annotations)}),
        "spec": {
            "containers": [
                {"name": f"c{index}", "image": "example.test/solver", "resources": entry}
                for index, entry in enumerate(resources or ({"limits": {"cpu": "4", "memory": "8Gi"}},))
            ],
            **spec,
        },
    }


def written_request(pod: Mapping[str, Any]) -> PodRequest:
    """Read the request that admission wrote on a pod."""
    return read_pod_request(pod["metadata"]["annotations"]["kvplace.io/request"])


def container(pod: Mapping[str, Any], name: str) -> Json:
    """Find a container by name."""
    found: Json = next(entry for entry in containers(pod) if entry["name"] == name)
    return found


def containers(pod: Mapping[str, Any]) -> list[Json]:
    """List all containers of a pod, init containers first."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def apply_patch(document: Any, operations: list[Json]) -> Any:
    """Apply RFC 6902 operations strictly: what an operation names must be there, what it adds must not."""
    document = copy.deepcopy(document)
    for operation in operations:
        if operation["path"] == "":
            assert operation["op"] == "replace"
            document = operation["value"]
            continue
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        )
        target = document
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            _change_list(target, last, operation)
        else:
            assert (last in target) is (operation["op"] != "add"), operation
            if operation["op"] == "remove":
                del target[last]
            else:
                target[last] = copy.deepcopy(operation["value"])
    return document


def unchanged_but_for(raw: Json, admitted: Admitted, before: Json) -> Json:
    """Return the admitted object; its patch must make it of `raw`, which must be as it was before."""
    assert raw == before
    assert apply_patch(raw, list(admitted.patch)) == admitted.object
    return dict(admitted.object)


def _change_list(target: list[Any], last: str, operation: Json) -> None:
    match operation["op"]:
        case "add":
            target.insert(len(target) if last == "-" else int(last), copy.deepcopy(operation["value"]))
        case "remove":
            del target[int(last)]
        case "replace":
            target[int(last)] = copy.deepcopy(operation["value"])


def as_defaulted(pod: Mapping[str, Any]) -> Json:
    """Add to a pod what the API server's defaulting adds between two calls of a webhook."""
    made = copy.deepcopy(dict(pod))
    for volume in made["spec"].get("volumes", []):
        if "downwardAPI" in volume:
            volume["downwardAPI"].setdefault("defaultMode", 420)
            for item in volume["downwardAPI"]["items"]:
                item["fieldRef"].setdefault("apiVersion", "v1")
    for entry in containers(made):
        for variable in entry.get("env", []):
            if "fieldRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
        if "startupProbe" in entry:
            entry["startupProbe"].setdefault("successThreshold", 1)
        resources = {kind: of or {} for kind, of in (entry.get("resources") or {}).items()}
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}
        entry["resources"] = resources
    made["spec"]["schedulerName"] = made["spec"].get("schedulerName") or "default-scheduler"
    return made


class Vmis:
    """The VMIs of a cluster, which may be unavailable."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Json] = {}
        self.away = False
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        self.asked.set()
        await self.may_answer.wait()
        if self.away:
            raise Unavailable("the API server does not answer: connection refused")
        return self.stored.get((namespace, name))
