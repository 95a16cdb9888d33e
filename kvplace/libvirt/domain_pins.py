"""The pins of one running domain as libvirt keeps them, and as they travel to the process that sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.scalars import NO_CPUS, CpuMask

SOCKET = "run/libvirt/virtqemud-sock"
"""Where the libvirt of a virt-launcher pod listens, below the root of its compute container."""


@dataclass(frozen=True, slots=True)
class DomainPins:
    """CPUs by vCPU, of the emulator and by I/O thread; a pin without CPUs stays as it is."""

    vcpus: Mapping[int, CpuMask] = field(default_factory=lambda: MappingProxyType({}))
    other_vcpus: CpuMask = NO_CPUS
    """CPUs of every vCPU that `vcpus` does not name, such as one that can be plugged in later."""
    emulator: CpuMask = NO_CPUS
    io_threads: Mapping[int, CpuMask] = field(default_factory=lambda: MappingProxyType({}))

    def document(self) -> dict[str, Any]:
        """Write the pins as a JSON object."""
        return {
            "vcpus": {str(number): format_cpu_list(cpus) for number, cpus in self.vcpus.items()},
            "otherVcpus": format_cpu_list(self.other_vcpus),
            "emulator": format_cpu_list(self.emulator),
            "ioThreads": {str(number): format_cpu_list(cpus) for number, cpus in self.io_threads.items()},
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> DomainPins:
        """Read the object that `document` has written."""
        return cls(
            vcpus={int(number): parse_cpu_list(cpus) for number, cpus in document["vcpus"].items()},
            other_vcpus=parse_cpu_list(document["otherVcpus"]),
            emulator=parse_cpu_list(document["emulator"]),
            io_threads={int(number): parse_cpu_list(cpus) for number, cpus in document["ioThreads"].items()},
        )
