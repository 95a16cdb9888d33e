"""KubeVirt's own code between a VMI and its hook: defaults, conversion to domain XML, and the hooks client.

Each question is one short-lived process of the program `launcher-side`, which links KubeVirt's packages:
the answers are KubeVirt's, not our reading of it. No cluster is involved.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]


class LauncherSideFailed(Exception):
    """The program could not answer at all; the message is its output."""


@dataclass(frozen=True, slots=True)
class HostCell:
    """One NUMA node of the host, in the form of libvirt for KubeVirt."""

    id: int
    cores: Sequence[Sequence[int]]
    memory_kib: int = 64 << 20
    huge_pages: Mapping[int, int] | None = None
    """Count by page size in KiB."""


def host_topology(cells: Iterable[HostCell], *, near: int = 10, far: int = 21) -> Json:
    """Describe a host in the form that virt-handler hands to virt-launcher."""
    given = tuple(cells)
    return {
        "numa_cells": [
            {
                "id": cell.id,
                "memory": {"amount": cell.memory_kib, "unit": "KiB"},
                "pages": [
                    {"size": size, "unit": "KiB", "count": count}
                    for size, count in (cell.huge_pages or {}).items()
                ],
                "distances": [
                    {"id": other.id, "value": near if other.id == cell.id else far} for other in given
                ],
                "cpus": [{"id": cpu, "siblings": list(core)} for core in cell.cores for cpu in core],
            }
            for cell in given
        ]
    }


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that virt-launcher did with its sidecars."""

    error: str
    """The failure that the client got instead of an answer; empty when it went well."""
    seconds: float
    sent: str = ""
    returned: str = ""
    data: Json | None = None

    @classmethod
    def from_json(cls, step: Json) -> Self:
        return cls(
            error=step.get("error", ""),
            seconds=step["seconds"],
            sent=step.get("sent", ""),
            returned=step.get("returned", ""),
            data=step.get("data"),
        )


@dataclass(frozen=True, slots=True)
class HookReport:
    """Everything that virt-launcher saw of its sidecars, from the first search for sockets to Shutdown."""

    collect: Step
    calls: tuple[Step, ...]
    cloud_init: Step | None
    shutdown: Step | None

    @classmethod
    def from_json(cls, report: Json) -> Self:
        return cls(
            collect=Step.from_json(report["collect"]),
            calls=tuple(Step.from_json(call) for call in report["calls"]),
            cloud_init=Step.from_json(report["cloudInit"]) if "cloudInit" in report else None,
            shutdown=Step.from_json(report["shutdown"]) if "shutdown" in report else None,
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """Everything that happened, in order."""
        cloud_init = () if self.cloud_init is None else (self.cloud_init,)
        shutdown = () if self.shutdown is None else (self.shutdown,)
        return (self.collect, *cloud_init, *self.calls, *shutdown)

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors, in order; empty when virt-launcher got an answer to everything."""
        return tuple(step.error for step in self.steps if step.error)

    @property
    def defined(self) -> str:
        """The XML that libvirt would have got last; raises `LookupError` when there is none."""
        if not self.calls or self.calls[-1].error:
            raise LookupError(f"no domain was defined: {self.errors}")
        return self.calls[-1].returned


class LauncherSide:
    """The program's questions as functions."""

    def __init__(self, programs: Path) -> None:
        self._program = programs / "launcher-side"

    def default_vmi(self, vmi: Json | str, configuration: Json | None = None) -> Json:
        """Fill in all defaults of KubeVirt's admission, as on creation.

        `vmi` is a manifest, parsed or as YAML; `configuration` is `spec.configuration` of the KubeVirt CR.
        """
        flags = () if configuration is None else ("-configuration", json.dumps(configuration))
        defaulted: Json = json.loads(self._ask("defaults", flags, vmi))
        return defaulted

    def domain_xml_of(
        self,
        vmi: Json | str,
        *,
        cpuset: str = "",
        topology: Json | None = None,
        emulation: bool = False,
        kvm: bool = True,
    ) -> str:
        """Convert a defaulted VMI to the domain XML that the first call of OnDefineDomain carries.

        `cpuset` are the CPUs of the compute container and `topology` the host's (`host_topology`); both are
        needed with dedicatedCpuPlacement. With `emulation` and without `kvm` the domain is one for TCG.
        """
        printed = self._ask("define-domain", _host_flags(cpuset, topology, emulation, kvm), vmi)
        return printed.removesuffix("\n")

    def call_hook(self, vmi: Json | str, sockets: Path, **options: Any) -> HookReport:
        """Call the sidecars of one VM as virt-launcher does; the options are as in `hook_flags`.

        `sockets` stands in for /var/run/kubevirt-hooks: it holds one folder per sidecar, with its socket.
        Calls that fail are part of the report.
        """
        answer = self._ask("call-hook", hook_flags(sockets, **options), vmi)
        return HookReport.from_json(json.loads(answer))

    async def call_hook_async(self, vmi: Json | str, sockets: Path, **options: Any) -> HookReport:
        """Do as `call_hook` does, without holding up the event loop; cancelled, it ends the program."""
        process = await asyncio.create_subprocess_exec(
            self._program,
            "call-hook",
            *hook_flags(sockets, **options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            answer, complaint = await process.communicate(_text(vmi).encode())
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise LauncherSideFailed(complaint.decode().strip())
        return HookReport.from_json(json.loads(answer))

    def _ask(self, command: str, flags: Sequence[str], vmi: Json | str) -> str:
        done = subprocess.run(
            [self._program, command, *flags], input=_text(vmi), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise LauncherSideFailed(done.stderr.strip())
        return done.stdout


def hook_flags(
    sockets: Path,
    *,
    sidecars: int = 1,
    collect_timeout_s: float = 10,
    domain: Path | None = None,
    calls: int = 3,
    chained: bool = False,
    placeholders: int = 4,
    root_ports: int = 4,
    cloud_init: bool = False,
    shutdown: bool = True,
    cpuset: str = "",
    topology: Json | None = None,
    emulation: bool = False,
    kvm: bool = True,
) -> tuple[str, ...]:
    """Spell the options of a call.

    Args:
        sockets: the folder of the sidecars' folders.
        sidecars: how many virt-launcher waits for.
        collect_timeout_s: its patience with them (240 to 359 s in the field).
        domain: a file with the XML to begin with; without one the VMI is converted.
        calls: 1 as on s390x and on a migration target, 2 as without free interface slots, or 3, the common
            case: with placeholder interfaces, without them, and with root ports for hotplug.
        chained: feed every complete answer into the next call; then any number of calls is possible.
        placeholders: how many placeholder interfaces the first of three calls has.
        root_ports: how many root ports the last of several calls adds.
        cloud_init: call PreCloudInitIso first.
        shutdown: call Shutdown last; then a sidecar ends.
        cpuset: see `LauncherSide.domain_xml_of`, also for the three below.
        topology: likewise.
        emulation: likewise.
        kvm: likewise.
    """
    return (
        *("-sockets", str(sockets)),
        *("-sidecars", str(sidecars)),
        *("-collect-timeout", f"{collect_timeout_s}s"),
        *(() if domain is None else ("-domain", str(domain))),
        *("-calls", str(calls)),
        *(("-chained",) if chained else ()),
        *("-placeholders", str(placeholders)),
        *("-root-ports", str(root_ports)),
        *(("-pre-cloud-init-iso",) if cloud_init else ()),
        *(() if shutdown else ("-shutdown=false",)),
        *_host_flags(cpuset, topology, emulation, kvm),
    )


def _host_flags(cpuset: str, topology: Json | None, emulation: bool, kvm: bool) -> tuple[str, ...]:
    return (
        *(("-cpuset", cpuset) if cpuset else ()),
        *(() if topology is None else ("-topology", json.dumps(topology))),
        *(("-emulation",) if emulation else ()),
        *(() if kvm else ("-kvm=false",)),
    )


def _text(vmi: Json | str) -> str:
    return vmi if isinstance(vmi, str) else json.dumps(vmi)
