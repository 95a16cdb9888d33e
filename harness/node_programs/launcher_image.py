"""The image of virt-launcher: KubeVirt's programs with libvirt and QEMU of this machine's Debian packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.build_cache import BuildFailed
from harness.go_build import built, downloaded, tail
from harness.node_programs.debian import installed_packages
from harness.node_programs.image import Image, Layer
from harness.node_programs.oci_archive import Attributes, ImageConfiguration
from harness.node_programs.programs import KUBEVIRT_NODE, system_program
from harness.node_programs.root_filesystem import RootFilesystem

_QEMU = 107
_KUBEVIRTS = (
    *("virt-launcher", "virt-launcher-monitor", "virt-probe", "virt-tail", "virt-freezer"),
    "libvirt-hook-client",
)
# Each program with the Debian package that has it.
_SYSTEMS = {
    "libvirtd": "libvirt-daemon",
    "virtlogd": "libvirt-daemon",
    "virsh": "libvirt-clients",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "bash": "bash",
}
_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
_MODULES = (_LIBRARIES / "libvirt", _LIBRARIES / "qemu")
_READ_BY_THEM = tuple(
    Path(name)
    for name in ("/usr/share/libvirt/cpu_map", "/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu")
)
_OF_OTHER_MACHINES = ("hppa", "openbios", "opensbi", "palcode", "s390", "skiboot", "slof", "trace-events")
_NET_BIND_SERVICE = "\x01\0\0\x02\0\x04\0\0" + "\0" * 12
"""struct vfs_cap_data, revision 2: CAP_NET_BIND_SERVICE permitted and effective."""
_FOLDERS = (
    *("/home/qemu", "/init/usr/bin", "/var/cache", "/var/lib/libvirt", "/var/log/libvirt/qemu", "/etc/qemu"),
    *("/path", "/hotplug"),  # mount points of KubeVirt's pods
)
# Debian has the one daemon for everything; KubeVirt starts virtqemud and wants its socket.
_VIRTQEMUD = """\
#!/bin/sh
folder=${XDG_RUNTIME_DIR:-/run}/libvirt
[ "$(id -u)" = 0 ] && folder=/run/libvirt
mkdir -p "$folder"
ln -sf libvirt-sock "$folder/virtqemud-sock"
exec /usr/sbin/libvirtd "$@"
"""


def launcher() -> Image:
    """Return the image of virt-launcher, by the reference that the tests give virt-controller."""
    programs = built(KUBEVIRT_NODE)
    return Image(
        "kubevirt.test/virt-launcher:latest",
        (
            Layer(
                "virt-launcher",
                (programs.name, installed_packages()),
                lambda root: _lay_out(RootFilesystem(root), programs),
            ),
        ),
        ImageConfiguration(entrypoint=("/usr/bin/virt-launcher",), user=str(_QEMU)),
    )


def _lay_out(files: RootFilesystem, programs: Path) -> Attributes:
    files.skeleton()
    for name in _KUBEVIRTS:
        files.program(programs / name, f"/usr/bin/{name}")
    for name, package in _SYSTEMS.items():
        program = system_program(name, package)
        files.program(program, f"/usr/{program.parent.name}/{name}")
    files.program(Path("/usr/lib/libvirt/libvirt_iohelper"))
    for folder in _MODULES:
        for module in sorted(folder.rglob("*.so")):
            files.program(module)
    for folder in _READ_BY_THEM:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith(_OF_OTHER_MACHINES):
                files.file(path)
    files.text("/usr/sbin/virtqemud", _VIRTQEMUD, mode=0o755)
    _add_busybox(files)
    _add_kubevirts_files(files, downloaded(KUBEVIRT_NODE, "kubevirt.io/kubevirt"))
    files.users(("qemu", _QEMU, "/home/qemu"), ("libvirt-qemu", 64055, "/"), ("kvm", 104, "/"))
    for made in _FOLDERS:
        files.folder(made)
    files.add_libraries()
    files.index_libraries()
    return Attributes(
        owners={"etc/libvirt/hooks": _QEMU, "home/qemu": _QEMU},
        capabilities={"usr/bin/virt-launcher-monitor": _NET_BIND_SERVICE},
    )


def _add_busybox(files: RootFilesystem) -> None:
    busybox = system_program("busybox", package="busybox-static")
    files.file(busybox, "/usr/bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if not any(files.at(f"/usr/{folder}/{name}").exists() for folder in ("bin", "sbin")):
            files.link(f"/usr/bin/{name}", "busybox")


def _add_kubevirts_files(files: RootFilesystem, kubevirt: Path) -> None:
    source = kubevirt / "cmd" / "virt-launcher"
    files.file(source / "qemu.conf", "/etc/libvirt/qemu.conf")
    files.file(source / "virtqemud.conf", "/etc/libvirt/virtqemud.conf")
    files.text("/etc/libvirt/virtlogd.conf", "")
    files.text("/etc/libvirt/hooks/qemu", (source / "qemu").read_text(), mode=0o755)
    labeller = (source / "node-labeller" / "node-labeller.sh").read_text()
    files.text("/usr/bin/node-labeller.sh", labeller, mode=0o755)
    target = files.at("/usr/bin/container-disk")
    code = kubevirt / "cmd" / "container-disk-v2alpha" / "main.c"
    compiled = subprocess.run(
        ["gcc", "-static", "-O2", "-o", target, code], capture_output=True, text=True, check=False
    )
    if compiled.returncode != 0:
        raise BuildFailed(f"container-disk could not be compiled:\n{tail(compiled.stderr)}")
