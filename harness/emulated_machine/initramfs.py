"""The first file system of an emulated machine: enough to mount the root file system of this one.

It holds busybox, the kernel's modules for that mount, and a script that loads and mounts.
"""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Drivers built into a kernel have no file among its modules, and are left out.
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_net"),
    *("nvme", "vfio_iommu_type1", "vfio_pci"),
)
MOUNT_TAG = "host"
HOST_ADDRESS = "10.96.0.1"
"""A guest's name for this machine's loopback; the API server's certificate is for this address, too."""
GUEST_ADDRESS = "10.96.0.2"
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")

INIT = f"""\
#!/bin/busybox sh
set -e
alias mount='/bin/busybox mount' mkdir='/bin/busybox mkdir -p'
for module in /modules/*; do /bin/busybox insmod $module; done
mkdir /lower /upper /machine
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 {MOUNT_TAG} /lower
mount -t tmpfs -o size=75% tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /machine
mount -t proc proc /machine/proc
mount -t sysfs sysfs /machine/sys
mount -t devtmpfs devtmpfs /machine/dev
mkdir /machine/dev/shm /machine/dev/pts /machine/dev/hugepages
mount -t tmpfs tmpfs /machine/dev/shm
mount -t devpts devpts /machine/dev/pts
mount -t hugetlbfs hugetlbfs /machine/dev/hugepages
mount -t tmpfs -o mode=755 tmpfs /machine/run
mount -t cgroup2 cgroup2 /machine/sys/fs/cgroup
/bin/busybox ip link set lo up
/bin/busybox ip address add {GUEST_ADDRESS}/24 dev eth0
/bin/busybox ip link set eth0 up
echo emulated > /machine/proc/sys/kernel/hostname
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C.UTF-8
exec /bin/busybox switch_root /machine "$KVPLACE_PYTHON" -P -m harness.emulated_machine.inside
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder of an archive."""

    path: str
    mode: int
    content: bytes = b""


def initramfs(busybox: Path, modules: Path) -> bytes:
    """Build the archive from a static busybox and a folder of modules that are to be loaded by name."""
    entries = [Entry(folder, stat.S_IFDIR | 0o755) for folder in ("bin", "dev", "modules")]
    entries.append(Entry("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    entries.append(Entry("init", stat.S_IFREG | 0o755, INIT.encode()))
    entries.extend(
        Entry(f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
        for module in sorted(modules.iterdir())
    )
    return cpio(entries)


def in_loading_order(folder: Path) -> dict[str, bytes]:
    """Read the wanted modules of a kernel and their dependencies, each after its own dependencies."""
    available = {_key(path.name.partition(".ko")[0]): path for path in folder.rglob("*.ko*")}
    ordered: dict[str, bytes] = {}

    def take(name: str) -> None:
        if name in ordered or name not in available:
            return
        content = _content(available[name])
        depends = _DEPENDS.search(content)
        for needed in depends[1].decode().split(",") if depends else ():
            take(_key(needed))
        ordered[name] = content

    for name in MODULES:
        take(_key(name))
    return ordered


def _key(name: str) -> str:
    """Spell a module's name in one of the two ways that the kernel takes for the same."""
    return name.replace("-", "_")


def _content(module: Path) -> bytes:
    content = module.read_bytes()
    return lzma.decompress(content) if module.suffix == ".xz" else content


def cpio(entries: list[Entry]) -> bytes:
    """Write an archive in the `newc` format.

    See the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    return b"".join(_cpio_parts([*entries, Entry("TRAILER!!!", 0)]))


def _cpio_parts(entries: list[Entry]) -> Iterator[bytes]:
    for number, entry in enumerate(entries, start=1):
        name = entry.path.encode() + b"\0"
        # Inode, mode, user, group, links, time, size, device twice, length of the name, checksum.
        fields = (number, entry.mode, 0, 0, 1, 0, len(entry.content), 0, 0, 0, 0, len(name), 0)
        yield _padded(b"070701" + b"".join(b"%08x" % field for field in fields) + name)
        yield _padded(entry.content)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)
