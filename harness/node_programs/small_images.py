"""The small images that pods of tests use: pause, busybox, kube-scheduler, and a disk for VMs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harness.node_programs.image import Image, Layer
from harness.node_programs.oci_archive import Attributes, ImageConfiguration
from harness.node_programs.programs import node_programs, system_program
from harness.node_programs.root_filesystem import RootFilesystem

_QEMU = 107
_DISK_BYTES = 16 * 1024 * 1024


def busybox() -> Image:
    """Return an image with busybox and a link for each of its programs."""
    return Image("docker.io/library/busybox:1", (_busybox_layer(),), ImageConfiguration(command=("sh",)))


def pause() -> Image:
    """Return the image of pod sandboxes: one process that does nothing."""
    return Image(
        "registry.k8s.io/pause:3", (_busybox_layer(),), ImageConfiguration(entrypoint=("/bin/sleep", "inf"))
    )


def container_disk() -> Image:
    """Return an image for a VM's containerDisk: a disk with a boot sector that halts."""
    return Image(
        "docker.io/kvplace/idle-disk:1",
        (Layer("idle-disk", (), _lay_out_disk),),
        ImageConfiguration(),
    )


def kube_scheduler() -> Image:
    """Return the image of kvplace's scheduler, as manifests/scheduler names it."""
    program = node_programs().kube_scheduler

    def lay_out(root: Path) -> Attributes:
        RootFilesystem(root).file(program, "/usr/local/bin/kube-scheduler")
        return Attributes()

    return Image(
        "registry.k8s.io/kube-scheduler:v1.36.3",
        (Layer("kube-scheduler", (program.parent.name,), lay_out),),
        ImageConfiguration(
            entrypoint=("kube-scheduler",), environment={"PATH": "/usr/local/bin"}, user="65532:65532"
        ),
    )


def _busybox_layer() -> Layer:
    program = system_program("busybox", package="busybox-static")

    def lay_out(root: Path) -> Attributes:
        for folder in ("bin", "etc", "tmp"):
            (root / folder).mkdir()
        (root / "tmp").chmod(0o1777)
        shutil.copy(program, root / "bin" / "busybox")
        listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
        for applet in set(listed.split()) - {"busybox"}:
            (root / "bin" / applet).symlink_to("busybox")
        (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        (root / "etc" / "group").write_text("root:x:0:\n")
        return Attributes()

    return Layer("busybox", (str(program.stat().st_mtime_ns), str(program.stat().st_size)), lay_out)


def _lay_out_disk(root: Path) -> Attributes:
    (root / "disk").mkdir()
    sti_hlt_jump_back = b"\xfb\xf4\xeb\xfd"
    boot_sector = sti_hlt_jump_back.ljust(510, b"\0") + b"\x55\xaa"
    with (root / "disk" / "disk.img").open("wb") as disk:
        disk.write(boot_sector)
        disk.truncate(_DISK_BYTES)
    return Attributes(owners={"disk": _QEMU})
