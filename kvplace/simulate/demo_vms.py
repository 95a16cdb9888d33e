"""The VMs of the demo: drawn from `vm-templates/`, with KubeVirt's objects for each.

The templates are at the top of the project, and inside the installed package. Equal seeds make equal VMs.
Among many VMs three have mistakes that real users make and must be refused. VMI, virt-launcher pod and
libvirt domain have the fields that kvplace reads or changes, as virt-controller and virt-launcher write them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from kvplace.admission.objects import Vmi, typed
from kvplace.admission.sidecar import HOOK_SIDECARS
from kvplace.admission.size import Size, size_of_vm
from kvplace.core.errors import Misconfigured
from kvplace.core.quantity import bytes_in_pages, format_bytes
from kvplace.core.strict_json import Json

_FOLDER = "vm-templates"

_SHARES = {
    "web-server": 28,
    "ci-runner": 16,
    "game-server": 16,
    "batch-worker": 12,
    "database": 9,
    "network-function": 9,
    "trading-engine": 7,
    "analytics": 3,
}
"""How often each template is used, in percent."""
_CORES = {"web-server": (2, 4, 4, 8), "database": (8, 16, 24), "analytics": (32, 48, 64)}
"""Cores to draw from; other templates keep their size."""
_FEWEST_WITH_MISTAKES = 20


def read_templates() -> dict[str, dict[str, Any]]:
    """Read every template by its name, in the order of the names.

    Raises Misconfigured when this installation has none.
    """
    from kvplace.documents.reading import read_document

    return {
        entry.name.removesuffix(".yaml"): read_document(entry.read_text(encoding="utf-8"), entry.name)
        for entry in sorted(_folder().iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def _folder() -> Traversable:
    inside = files("kvplace.simulate") / _FOLDER
    if inside.is_dir():
        return inside
    beside = Path(__file__).resolve().parents[2] / _FOLDER
    if beside.is_dir():
        return beside
    raise Misconfigured(f"this installation of kvplace has no {_FOLDER}; reinstall it")


def demo_vms(templates: Mapping[str, Json], count: int, seed: int) -> list[Json]:
    """Make so many VMs, named after their template and numbered."""
    chance = random.Random(seed)
    names = [name for name in _SHARES if name in templates]
    chosen = chance.choices(names, weights=[_SHARES[name] for name in names], k=count)
    vms = [_vm(templates[name], f"{name}-{number:03d}", chance) for number, name in enumerate(chosen, 1)]
    if has_mistakes(count):
        for (name, mistake), number in zip(_MISTAKES, (count // 4, count // 2, count * 3 // 4), strict=True):
            if name in templates:
                vms[number] = _vm(templates[name], f"{name}-{number + 1:03d}", chance)
                mistake(vms[number]["spec"]["template"])
    return vms


def has_mistakes(count: int) -> bool:
    """Whether so many VMs are enough for three of them to be wrong."""
    return count >= _FEWEST_WITH_MISTAKES


def _vm(template: Json, name: str, chance: random.Random) -> Json:
    vm = copy.deepcopy(template)
    vm["metadata"]["name"] = name
    domain = vm["spec"]["template"]["spec"]["domain"]
    kind = template["metadata"]["name"]
    if kind in _CORES:
        before = domain["cpu"]["cores"]
        domain["cpu"]["cores"] = chance.choice(_CORES[kind])
        memory = int(domain["memory"]["guest"].removesuffix("Gi")) * domain["cpu"]["cores"] // before
        domain["memory"]["guest"] = f"{memory}Gi"
    return vm


def _misspelt(template: Json) -> None:
    template["metadata"]["annotations"]["cpu-set"] = "one-soket"


def _wider_than_any_numa_node(template: Json) -> None:
    template["spec"]["domain"]["cpu"]["cores"] = 250


def _more_huge_pages_than_any_numa_node(template: Json) -> None:
    template["spec"]["domain"]["memory"]["guest"] = "256Gi"


_MISTAKES: tuple[tuple[str, Callable[[Json], None]], ...] = (
    ("network-function", _more_huge_pages_than_any_numa_node),
    ("trading-engine", _wider_than_any_numa_node),
    ("web-server", _misspelt),
)

_LAUNCHER_IMAGE = "quay.io/kubevirt/virt-launcher:v1.9.0"
_OVERHEAD = 312 << 20
"""About the memory that KubeVirt requests for QEMU and itself beside the guest's memory."""


def vmi_of_vm(vm: Mapping[str, Any], *, namespace: str) -> Json:
    """Make the VMI that the VM controller creates for a VM."""
    template = vm["spec"]["template"]
    metadata = template.get("metadata") or {}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": vm["metadata"]["name"],
            "namespace": namespace,
            "annotations": dict(metadata.get("annotations") or {}),
            "labels": dict(metadata.get("labels") or {}),
        },
        "spec": template["spec"],
    }


def size_of(vmi: Mapping[str, Any]) -> Size:
    """Read how large a VMI is."""
    return size_of_vm(typed(vmi, Vmi).spec.domain, f"VirtualMachineInstance {vmi['metadata']['name']}: spec")


def launcher_pod(vmi: Mapping[str, Any]) -> Json:
    """Make the virt-launcher pod of a VMI that the API server has stored (it has a UID)."""
    metadata, size = vmi["metadata"], size_of(vmi)
    name, namespace = metadata["name"], metadata["namespace"]
    sidecars = json.loads(metadata["annotations"].get(HOOK_SIDECARS) or "[]")
    in_pages = bytes_in_pages(size.huge_pages)
    requests = {
        "cpu": f"{size.vcpus * 100}m",
        "memory": format_bytes(size.memory - in_pages + _OVERHEAD),
        **{f"hugepages-{format_bytes(page)}": format_bytes(page * n) for page, n in size.huge_pages.items()},
    }
    limits = {key: value for key, value in requests.items() if key.startswith("hugepages-")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"virt-launcher-{name}-",
            "namespace": namespace,
            "annotations": {**metadata["annotations"], "kubevirt.io/domain": name},
            "labels": {
                **metadata["labels"],
                "kubevirt.io": "virt-launcher",
                "kubevirt.io/created-by": metadata["uid"],
                "vmi.kubevirt.io/id": name,
            },
            "ownerReferences": [
                {
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "VirtualMachineInstance",
                    "name": name,
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "containers": [
                {
                    "name": "compute",
                    "image": _LAUNCHER_IMAGE,
                    "command": ["/usr/bin/virt-launcher-monitor"],
                    "args": ["--name", name, "--namespace", namespace, "--hook-sidecars", str(len(sidecars))],
                    "resources": {"requests": requests, "limits": {**limits, "devices.kubevirt.io/kvm": "1"}},
                },
                *(_sidecar(number, entry) for number, entry in enumerate(sidecars)),
            ],
            "nodeSelector": {"kubevirt.io/schedulable": "true"},
            "restartPolicy": "Never",
            "volumes": [{"name": "hook-sidecar-sockets", "emptyDir": {}}],
        },
    }


def domain_xml(vmi: Mapping[str, Any]) -> bytes:
    """Write the domain that virt-launcher passes to its hooks."""
    metadata, size = vmi["metadata"], size_of(vmi)
    cpu = vmi["spec"]["domain"].get("cpu") or {}
    cores, threads = cpu.get("cores", 1), cpu.get("threads", 1)
    sockets = size.vcpus // (cores * threads)
    lines = [
        '<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">',
        f"\t<name>{escape(metadata['namespace'])}_{escape(metadata['name'])}</name>",
        f'\t<memory unit="b">{size.memory}</memory>',
        "\t<os>",
        '\t\t<type arch="x86_64" machine="q35">hvm</type>',
        '\t\t<smbios mode="sysinfo"></smbios>',
        "\t</os>",
        *_memory_backing(size),
        "\t<devices>",
        '\t\t<controller type="virtio-serial" index="0" model="virtio-non-transitional"></controller>',
        *_disks(vmi["spec"].get("volumes", ())),
        '\t\t<memballoon model="none"></memballoon>',
        "\t</devices>",
        "\t<metadata>",
        '\t\t<kubevirt xmlns="http://kubevirt.io">',
        f"\t\t\t<uid>{escape(metadata['uid'])}</uid>",
        "\t\t</kubevirt>",
        "\t</metadata>",
        "\t<features>",
        "\t\t<acpi></acpi>",
        "\t</features>",
        '\t<cpu mode="host-model">',
        f'\t\t<topology sockets="{sockets}" cores="{cores}" threads="{threads}"></topology>',
        "\t</cpu>",
        f'\t<vcpu placement="static">{size.vcpus}</vcpu>',
        *([f"\t<iothreads>{size.io_threads}</iothreads>"] if size.io_threads else []),
        "</domain>",
    ]
    return "\n".join(lines).encode()


def _sidecar(number: int, entry: Mapping[str, Any]) -> Json:
    name = f"hook-sidecar-{number}"
    container: Json = {
        "name": name,
        "image": entry.get("image", ""),
        "imagePullPolicy": entry.get("imagePullPolicy", "IfNotPresent"),
        "env": [{"name": "CONTAINER_NAME", "value": name}],
        "resources": {},
        "volumeMounts": [
            {"name": "hook-sidecar-sockets", "mountPath": "/var/run/kubevirt-hooks", "subPath": name}
        ],
    }
    return container | {key: entry[key] for key in ("command", "args") if key in entry}


def _memory_backing(size: Size) -> Iterator[str]:
    for page in size.huge_pages:
        yield "\t<memoryBacking>"
        yield "\t\t<hugepages>"
        yield f'\t\t\t<page size="{page}" unit="b"></page>'
        yield "\t\t</hugepages>"
        yield '\t\t<source type="memfd"></source>'
        yield "\t</memoryBacking>"


def _disks(volumes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, volume in enumerate(volumes):
        path = f"/var/run/kubevirt-ephemeral-disks/disk-data/{volume['name']}/disk.qcow2"
        yield '\t\t<disk device="disk" type="file" model="virtio-non-transitional">'
        yield f"\t\t\t<source file={quoteattr(path)}></source>"
        yield f'\t\t\t<target bus="virtio" dev="vd{chr(ord("a") + number % 26)}"></target>'
        yield "\t\t</disk>"
