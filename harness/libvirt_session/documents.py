"""Domain documents for real QEMU: a minimal one, and KubeVirt's own made to start without its pod.

Only the parts from the pod's image and network are taken away: disks, the tap device, sockets in KubeVirt's
folders, huge pages, KVM. All elements about the place of threads and memory stay as given.
"""

import platform
from pathlib import Path
from xml.etree import ElementTree as ET

from lxml import etree

_MACHINES = {"x86_64": "q35", "aarch64": "virt"}
_OF_THE_POD = (
    "devices/disk",
    "devices/interface/driver",
    "clock/timer[@name='hypervclock']",  # like the next two, a feature of KVM
    "features/hyperv",
    "features/kvm",
    "maxMemory",  # without slots, which libvirt before 10 refuses
    "memoryBacking",
    "os/loader",
    "os/nvram",
)
_PRIVATE = "/var/run/kubevirt-private/"


def minimal_domain(name: str, *, vcpus: int = 2, pluggable: int = 0, inside: str = "") -> str:
    """Gives a domain that starts anywhere: no disk, no network, 64 MiB; `inside` goes among its elements.

    It begins with `vcpus`, and as many as `pluggable` can be plugged in.
    """
    architecture = platform.machine()
    domain = ET.fromstring(f"""
      <domain type='qemu'>
        <name>{name}</name>
        <memory unit='MiB'>64</memory>
        <vcpu placement='static' current='{vcpus}'>{vcpus + pluggable}</vcpu>
        <os><type arch='{architecture}' machine='{_MACHINES[architecture]}'>hvm</type></os>
        <devices><controller type='usb' model='none'/><memballoon model='none'/></devices>
        {inside}
      </domain>""")
    return ET.tostring(domain, encoding="unicode")


def without_its_pod(document: bytes, folder: Path) -> bytes:
    """Makes a document of KubeVirt's converter start outside its pod; sockets go into `folder`."""
    root = etree.fromstring(document)
    root.set("type", "qemu")
    for path in _OF_THE_POD:
        for element in root.findall(path):
            parent = element.getparent()
            assert parent is not None
            parent.remove(element)
    for interface in root.findall("devices/interface"):
        interface.set("type", "user")
    for element in root.iter():
        for key, value in element.attrib.items():
            if str(value).startswith(_PRIVATE):
                element.set(key, str(folder / str(value).rpartition("/")[2]))
    return etree.tostring(root)
