"""A guest that boots under the session daemon, reports where its PCI devices are, and switches itself off."""

from __future__ import annotations

import shutil
import stat
import time
from collections import Counter
from pathlib import Path

from lxml import etree

from harness.emulated_machine.initramfs import Entry, cpio
from harness.emulated_machine.kernels import Kernel, fetched
from harness.libvirt_session.daemon import LibvirtSession

_INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t sysfs sysfs /sys
cd /sys/bus/pci/devices
for each in *; do
  echo device $each $(/bin/busybox cat $each/vendor $each/device $each/numa_node)
done
echo "all devices"
/bin/busybox poweroff -f
"""
_BOOT_S = 240.0
_RNG = ("0x1af4", "0x1044")


def numa_nodes_in_guest(session: LibvirtSession, domain: bytes) -> Counter[int]:
    """Boot a domain with an entropy device in the place of each device of the host.

    Counts these devices by the NUMA node that the guest's kernel reports. Raises AssertionError with the
    console of a guest that does not come to its end.
    """
    folder = session.folder / "booted"
    folder.mkdir(exist_ok=True)
    console = session.folder / "run" / "booted.log"
    with session.running(_bootable(domain, _files(folder), console)) as booting:
        booting.handle.resume()
        deadline = time.monotonic() + _BOOT_S
        while "all devices" not in (text := console.read_text(errors="replace") if console.exists() else ""):
            assert time.monotonic() < deadline, (
                f"after {_BOOT_S:.0f} s the domain is in state {booting.handle.state()}, "
                f"and its console shows {text[-4000:]!r}"
            )
            time.sleep(0.5)
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("device ")]
    return Counter(int(node) for _, vendor, device, node in lines if (vendor, device) == _RNG)


def _files(folder: Path) -> tuple[Path, Path]:
    """Give kernel and first file system; the daemon's user must be able to read them."""
    kernel, initrd = folder / "vmlinuz", folder / "initrd"
    shutil.copyfile(fetched(Kernel.V6_1).kernel, kernel)
    busybox = Path(shutil.which("busybox") or "").read_bytes()
    entries = [Entry(name, stat.S_IFDIR | 0o755) for name in ("bin", "dev", "sys")]
    entries.append(Entry("bin/busybox", stat.S_IFREG | 0o755, busybox))
    entries.append(Entry("init", stat.S_IFREG | 0o755, _INIT.encode()))
    initrd.write_bytes(cpio(entries))
    return kernel, initrd


def _bootable(domain: bytes, files: tuple[Path, Path], console: Path) -> bytes:
    root = etree.fromstring(domain)
    devices, machine = root.find("devices"), root.find("os")
    assert devices is not None
    assert machine is not None
    for name, text in (
        ("kernel", str(files[0])),
        ("initrd", str(files[1])),
        ("cmdline", "console=ttyS0 quiet panic=-1"),
    ):
        etree.SubElement(machine, name).text = text
    for theirs in (*devices.findall("serial"), *devices.findall("console"), *devices.findall("rng")):
        devices.remove(theirs)
    for assigned in devices.findall("hostdev"):
        address = assigned.find("address")
        rng = etree.fromstring("<rng model='virtio-non-transitional'><backend model='random'/></rng>")
        rng[0].text = "/dev/urandom"
        if address is not None:
            rng.append(address)
        devices.replace(assigned, rng)
    devices.append(etree.fromstring(f"<serial type='file'><source path='{console}'/></serial>"))
    return etree.tostring(root)
