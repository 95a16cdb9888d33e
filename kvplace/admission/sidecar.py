"""The hook sidecar: its mark on the VMI, and its container in the pod.

There are two front ends. With `annotation` KubeVirt creates the container from the entry in the annotation
`hooks.kubevirt.io/hookSidecars`, which has no fields for volumes, probes and resources. Pod admission adds
them: the results on the pod as files, libvirt's folder for hooks in the container of QEMU (see
`hook/arrivals.py`), the node's name, and a probe that holds the VM until its placement is in effect.

KubeVirt puts the container beside the container of QEMU, where it keeps the pod running until KubeVirt asks
it to end; a killed virt-launcher sends it nothing. So pod admission makes a restartable init container of it.
The kubelet ends such a container when the others have ended, for any reason, and starts the others only after
its startup probe has passed.

With `plugin` the VMI gets a label. Where the pod has it and KubeVirt's volume for sockets of Plugins, pod
admission adds the same container itself, and a Plugin calls it. A VMI never has both: KubeVirt would wait for
a socket that nothing opens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from kvplace.admission.edits import EditedObject
from kvplace.admission.objects import AdmittedContainer, Pod, Volume, is_guaranteed
from kvplace.core.errors import BadAnnotation, Misconfigured
from kvplace.core.well_known_names import (
    CPU_MAP,
    FRONT_END_LABEL,
    PLACEMENT,
    PLUGIN_SOCKET,
    REQUEST,
    FrontEnd,
)
from kvplace.kube.objects import COMPUTE

HOOK_SIDECARS = "hooks.kubevirt.io/hookSidecars"
COMMAND = ["kvplace-hook"]
READY = ["kvplace-hook", "ready"]
VOLUME = "kvplace-pod"
FOLDER = "/etc/kvplace-pod"
LIBVIRT_HOOKS = "kvplace-libvirt-hooks"
LIBVIRT_HOOKS_FOLDER = "/var/run/kvplace-libvirt-hooks"
"""Where our container sees the volume `LIBVIRT_HOOKS`."""
LIBVIRTS_FOLDER = "/etc/libvirt/hooks/qemu.d"
"""Where libvirt searches for programs, beside KubeVirt's own in the folder above."""
PLUGIN_SOCKETS = "kubevirt-plugin-sockets"
"""Volume that KubeVirt adds to every virt-launcher pod while its feature gate Plugins is on."""
_PLUGIN_FOLDER, _, _PLUGIN_SOCKET = PLUGIN_SOCKET.rpartition("/")
NODE_NAME = "NODE_NAME"
STAYS = "KVPLACE_STAYS_AFTER_SHUTDOWN"
"""Variable of a hook that the kubelet ends, so that it need not end itself."""

FILES = {
    "placement": f"metadata.annotations['{PLACEMENT}']",
    "cpu-map": f"metadata.annotations['{CPU_MAP}']",
    "request": f"metadata.annotations['{REQUEST}']",
    "uid": "metadata.uid",
    "name": "metadata.name",
    "namespace": "metadata.namespace",
}
"""Files of the volume, and the field of the pod that each one contains."""

_STARTUP_PROBE: dict[str, Any] = {
    "exec": {"command": READY},
    # Until it passes the kubelet does not start the containers after it, and it must never kill this one for
    # that. A kubelet that is younger than a probe's period sleeps for a part of it first.
    "periodSeconds": 1,
    "timeoutSeconds": 30,
    "failureThreshold": 2**31 - 1,
}
"""There is no readiness probe: after its start the container is Ready, and a late probe on a busy node must
not remove a running VM from its services."""
_RESOURCES = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "64Mi"}}
_QEMU = 107
"""User and group of virt-launcher and its sidecars."""
_SECURITY = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}


class _HookSidecar(msgspec.Struct, frozen=True):
    """One entry of `hookSidecars`."""

    command: Any = None


def with_hook_sidecar(entries: str | None, image: str) -> str | None:
    """Append our entry to the text of a VMI's `hookSidecars`; None when it is there already.

    Other entries stay unchanged. Raises BadAnnotation when the text is not a list of objects.
    """
    ours = _entry(image)
    if entries is None:
        return f"[{ours}]"
    try:
        read = msgspec.json.decode(entries, type=list[_HookSidecar] | None) or []
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        fix = 'must be a JSON list of objects such as [{"image": "..."}]; correct it or remove it'
        raise BadAnnotation(HOOK_SIDECARS, entries, fix) from None
    present = sum(entry.command == COMMAND for entry in read)
    if present > 1:
        raise BadAnnotation(
            HOOK_SIDECARS, entries, f"has {present} entries with the command {COMMAND[0]}; keep one"
        )
    if present:
        return None
    return f"{entries.rstrip()[:-1]},{ours}]" if read else f"[{ours}]"


@lru_cache(maxsize=8)
def _entry(image: str) -> str:
    entry = {"image": image, "imagePullPolicy": "IfNotPresent", "command": COMMAND, "args": ["serve"]}
    return json.dumps(entry, separators=(",", ":"))


def sidecars_of(pod: Pod) -> list[AdmittedContainer]:
    """List kvplace's hook sidecars among the containers of a pod, wherever they are."""
    return [each for each in (*pod.spec.containers, *(pod.spec.init_containers or ())) if _is_hook(each)]


def has_plugin_label(pod: Pod) -> bool:
    """Whether a Plugin of KubeVirt calls the hook of this pod."""
    return (pod.metadata.labels or {}).get(FRONT_END_LABEL) == FrontEnd.PLUGIN


def needs_container(pod: Pod) -> bool:
    """Whether pod admission adds the hook's container: a Plugin calls it, and it is not there yet."""
    volumes = {volume.name for volume in pod.spec.volumes or ()}
    return has_plugin_label(pod) and PLUGIN_SOCKETS in volumes and not sidecars_of(pod)


def add_sidecar_fields(pod: Pod, spec: EditedObject, what: str, image: str) -> None:
    """Make hook sidecars restartable init containers with volumes, a probe and resources; idempotent.

    A pod that needs the container for a Plugin gets one of `image`.

    A sidecar among the init containers keeps its place, so that several webhooks do not move it in turn. Any
    other goes to the end: the requests of earlier init containers do not add to its own.

    Raises Misconfigured when the name of a volume of ours is taken, or when there is no other container.
    """
    volumes = {volume.name: volume for volume in pod.spec.volumes or []}
    if VOLUME not in volumes:
        items = [{"path": path, "fieldRef": {"fieldPath": field}} for path, field in FILES.items()]
        spec.list("volumes").append({"name": VOLUME, "downwardAPI": {"items": items}})
    elif _files_of(volumes[VOLUME]) != FILES:
        raise _taken(VOLUME, what)
    if LIBVIRT_HOOKS not in volumes:
        spec.list("volumes").append({"name": LIBVIRT_HOOKS, "emptyDir": {}})
    elif volumes[LIBVIRT_HOOKS].empty_dir is None:
        raise _taken(LIBVIRT_HOOKS, what)
    others = [each for each in pod.spec.containers if not _is_hook(each)]
    if not others:
        raise Misconfigured(f"{what} has no container beside the hook sidecar; let KubeVirt create the pod")
    for index, container in enumerate(pod.spec.init_containers or ()):
        if _is_hook(container):
            _complete_container(spec.list("initContainers").object(index))
    for index in reversed(range(len(pod.spec.containers))):
        if _is_hook(pod.spec.containers[index]):
            moved = EditedObject.apart(spec.list("containers").remove(index))
            _complete_container(moved)
            spec.list("initContainers").append(moved.values)
    if needs_container(pod):
        added = EditedObject.apart(_plugin_container(image))
        if is_guaranteed(pod.spec, what):  # it stays in its QoS class
            added.put("resources", {"requests": _RESOURCES["limits"], "limits": _RESOURCES["limits"]})
        _complete_container(added)
        spec.list("initContainers").append(added.values)
    _show_to_libvirt(spec.list("containers").object(compute_index(others)))


def compute_index(containers: Sequence[AdmittedContainer]) -> int:
    """Return the position of the container with libvirt and QEMU, the first one where none has its name."""
    names = [container.name for container in containers]
    return names.index(COMPUTE) if COMPUTE in names else 0


def _plugin_container(image: str) -> dict[str, Any]:
    return {
        "name": "kvplace-hook",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": COMMAND,
        "args": ["serve"],
        "env": [
            {"name": "KVPLACE_HOOK_FOLDER", "value": _PLUGIN_FOLDER},
            {"name": "KVPLACE_SOCKET_NAME", "value": _PLUGIN_SOCKET},
        ],
        # A policy of KubeVirt demands the subPath.
        "volumeMounts": [{"name": PLUGIN_SOCKETS, "mountPath": _PLUGIN_FOLDER, "subPath": "kvplace"}],
        "securityContext": {
            "runAsUser": _QEMU,
            "runAsGroup": _QEMU,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _is_hook(container: AdmittedContainer) -> bool:
    return container.command == COMMAND


def _files_of(volume: Volume) -> dict[str, str]:
    items = volume.downward.items if volume.downward is not None else None
    return {item.path: item.field_ref.field_path for item in items or [] if item.field_ref is not None}


def _taken(name: str, what: str) -> Misconfigured:
    return Misconfigured(f"{what}: the volume name {name} is kvplace's; rename the volume")


def _show_to_libvirt(compute: EditedObject) -> None:
    """Mount our folder where libvirt searches for programs; a mount of others there stays."""
    mounts = compute.get("volumeMounts") or []
    if all(isinstance(mount, dict) and mount.get("mountPath") != LIBVIRTS_FOLDER for mount in mounts):
        compute.list("volumeMounts").append(
            {"name": LIBVIRT_HOOKS, "mountPath": LIBVIRTS_FOLDER, "readOnly": True}
        )


def _complete_container(container: EditedObject) -> None:
    container.put("restartPolicy", "Always")
    _put(container, "volumeMounts", {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}, "mountPath")
    _put(container, "volumeMounts", {"name": LIBVIRT_HOOKS, "mountPath": LIBVIRT_HOOKS_FOLDER}, "mountPath")
    env = {"name": NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    _put(container, "env", env, "name")
    _put(container, "env", {"name": STAYS, "value": "true"}, "name")
    # A probe of ours that the API server has defaulted has more fields, and stays.
    present = container.get("startupProbe")
    if not isinstance(present, dict) or present.get("exec") != _STARTUP_PROBE["exec"]:
        container.put("startupProbe", _STARTUP_PROBE)
    # KubeVirt sets equal requests and limits on Guaranteed pods, or the resources that its operator has
    # configured for sidecars; both take precedence over ours.
    resources = container.get("resources") or {}
    if not resources.get("requests") and not resources.get("limits"):
        container.put("resources", {**resources, **_RESOURCES})
    security = container.object("securityContext")
    for field, value in _SECURITY.items():
        if security.get(field) is None:
            security.put(field, value)


def _put(container: EditedObject, field: str, entry: dict[str, Any], key: str) -> None:
    """Add an entry to a list of the container; one with the same key and other content is replaced."""
    for index, present in enumerate(container.get(field) or []):
        if isinstance(present, dict) and present.get(key) == entry[key]:
            if not _contains(present, entry):
                container.list(field).replace(index, entry)
            return
    container.list(field).append(entry)


def _contains(present: Any, entry: Any) -> bool:
    """Whether `present` has all fields of `entry`; the API server may have added defaults to it."""
    if isinstance(entry, dict):
        return isinstance(present, dict) and all(
            key in present and _contains(present[key], value) for key, value in entry.items()
        )
    return bool(present == entry)
