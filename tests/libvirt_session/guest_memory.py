"""The memory of a running guest, as the kernel shows it."""

from __future__ import annotations

from pathlib import Path


def policies_of_guest_memory(pid: int, megabytes: int) -> set[str]:
    """Reads the memory policy of QEMU's mappings that are as large as the guest's memory."""
    ranges = [line.split()[0].partition("-") for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    size = megabytes << 20
    guest = {start for start, _, end in ranges if int(end, 16) - int(start, 16) == size}
    assert guest, f"QEMU has no mapping of {megabytes} MiB"
    lines = [line.split() for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()]
    return {policy for start, policy, *_ in lines if start in guest}
