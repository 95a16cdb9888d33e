"""virt-launcher's image: what KubeVirt starts in it runs there, without a file of this machine's."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.node_programs.image import archive
from harness.node_programs.launcher_image import launcher
from harness.node_programs.programs import NodePrograms
from tests.node_programs.archives import read_archive


@pytest.fixture(scope="module")
def layer(node_programs: NodePrograms) -> bytes:
    """Build the image as the tests of real nodes do."""
    assert node_programs.virt_handler.exists()
    with skipped_if_not_installed():
        image = read_archive(archive(launcher()))
    assert image.reference == "kubevirt.test/virt-launcher:latest"
    assert image.config["config"] == {"Entrypoint": ["/usr/bin/virt-launcher"], "User": "107"}
    (layer,) = image.layers
    return layer


@pytest.fixture(scope="module")
def root(layer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the image; root is needed for chroot."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    folder = tmp_path_factory.mktemp("launcher")
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        files.extractall(folder, filter="fully_trusted")
    return folder


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("/usr/bin/virt-launcher --help", "Usage of /usr/bin/virt-launcher"),
        ("/usr/bin/virt-launcher-monitor --help", "Usage of /usr/bin/virt-launcher-monitor"),
        ("/usr/bin/virt-probe --help", "Usage of /usr/bin/virt-probe"),
        ("/usr/bin/virt-tail --help", "Usage of /usr/bin/virt-tail"),
        ("/usr/bin/virt-freezer --help", "Usage of /usr/bin/virt-freezer"),
        ("/usr/sbin/libvirtd --version", "libvirtd (libvirt)"),
        ("/usr/sbin/virtlogd --version", "virtlogd (libvirt)"),
        ("/usr/bin/qemu-system-x86_64 -accel help", "tcg"),
        ("/usr/bin/qemu-system-x86_64 -M none -display none -device help", "virtio-blk-pci"),
        ("/usr/bin/qemu-img --version", "qemu-img version"),
        ("echo here | timeout 5 cat", "here"),
        ("id -u qemu", "107"),
        ("cat /etc/libvirt/virtqemud.conf", "listen_tls = 0"),
    ],
)
def test_a_program_of_the_image_runs_in_it(root: Path, command: str, answer: str) -> None:
    done = subprocess.run(
        ["chroot", root, "/usr/bin/bash", "-c", command], capture_output=True, text=True, check=False
    )
    assert answer in done.stdout + done.stderr


def test_every_module_of_libvirt_and_qemu_finds_its_libraries_in_the_image(root: Path) -> None:
    linker = root / "lib64" / "ld-linux-x86-64.so.2"
    assert linker.exists()
    modules = [path for path in (root / "usr" / "lib").rglob("*.so") if {"libvirt", "qemu"} & set(path.parts)]
    assert len(modules) > 20
    for module in modules:
        inside = f"/{module.relative_to(root)}"
        done = subprocess.run(
            ["chroot", root, "/lib64/ld-linux-x86-64.so.2", "--list", inside],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "not found" not in done.stdout, (inside, done.stdout)


def test_owners_and_capabilities_are_as_kubevirt_needs_them(layer: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        monitor = files.getmember("usr/bin/virt-launcher-monitor")
        hook = files.getmember("etc/libvirt/hooks/qemu")
        disk = files.getmember("usr/bin/container-disk")
    assert "SCHILY.xattr.security.capability" in monitor.pax_headers
    assert (hook.uid, hook.gid, hook.mode) == (107, 107, 0o755)
    assert disk.mode == 0o755
