"""Making the documents about domains, with KubeVirt's defaults and its converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from harness.control_plane.launcher_side import HostCell, LauncherSide, host_topology
from tests.kubevirt_documents import DOMAINS

NAMES = tuple(sorted(path.name.removesuffix(".vmi.yaml") for path in DOMAINS.glob("*.vmi.yaml")))
CONFIGURATION = {"vmRolloutStrategy": "Stage"}
WITH_LIVE_UPDATE = {"01-amd64-plain-4vcpu"}
"""Made with KubeVirt's default strategy, which prepares the domain for hot plug."""
CPUSETS: Mapping[str, tuple[int, ...]] = {
    "05-amd64-dedicated": (2, 3, 34, 35),
    "07-amd64-dedicated-numa-hugepages": (14, 15, 16, 17, 46, 47, 48, 49),
    "15-arm64-dedicated": (4, 5, 6, 7),
    "17-s390x-dedicated-iothreads": (4, 5, 6, 7),
}
"""CPUs of the compute container where the VM has dedicated ones."""


@dataclass(frozen=True)
class Documents:
    """The documents that KubeVirt makes of one VMI."""

    vmi: str
    domain: str


def kept(name: str) -> Documents:
    """Read the documents that are kept."""
    vmi, domain = (DOMAINS / f"{name}.{kind}" for kind in ("vmi.json", "domain.xml"))
    return Documents(vmi.read_text(encoding="utf-8"), domain.read_text(encoding="utf-8"))


def made(name: str, launcher_side: LauncherSide) -> Documents:
    """Make the documents of `NAME.vmi.yaml`."""
    manifest = yaml.safe_load((DOMAINS / f"{name}.vmi.yaml").read_text(encoding="utf-8"))
    configuration = None if name in WITH_LIVE_UPDATE else CONFIGURATION
    vmi = launcher_side.default_vmi(manifest, configuration)
    vmi["metadata"] = {key: vmi["metadata"][key] for key in ("name", "namespace", "uid", "labels")}
    vmi["status"] |= {
        "nodeName": "node01",
        "phase": "Scheduled",
        "guestOSInfo": {},
        "activePods": {"0b9f6a3e-1111-4a4a-9b9b-aaaaaaaaaaaa": "node01"},
    }
    domain = launcher_side.domain_xml_of(vmi, **host_of(name))
    return Documents(json.dumps(vmi, indent=2, sort_keys=True) + "\n", f"{domain}\n")


def host_of(name: str) -> dict[str, Any]:
    """Two NUMA nodes of 16 cores each; the sibling of CPU n is n + 32, where there are siblings."""
    if name not in CPUSETS:
        return {}
    threads = 2 if "amd64" in name else 1
    cells = [
        HostCell(
            id=node,
            cores=[(core, core + 32)[:threads] for core in range(16 * node, 16 * node + 16)],
            huge_pages={4: 1 << 20, 1 << 20: 64},
        )
        for node in (0, 1)
    ]
    return {"cpuset": ",".join(map(str, CPUSETS[name])), "topology": host_topology(cells)}
