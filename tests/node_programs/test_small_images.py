"""The images that pods of tests use: what runs in them, and what the disk of VMs does."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.node_programs.image import Image, archive
from harness.node_programs.programs import NodePrograms
from harness.node_programs.small_images import busybox, container_disk, kube_scheduler, pause
from tests.node_programs.archives import ReadImage, read_archive


def read(image: Image) -> ReadImage:
    found = read_archive(archive(image))
    assert found.reference == image.reference
    return found


def members(layer: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        return {member.name: member for member in files}


@pytest.fixture
def busybox_image() -> Image:
    """Name the image; skip where Debian's busybox is not installed."""
    with skipped_if_not_installed():
        return busybox()


def test_busybox_brings_its_programs_and_needs_no_library(busybox_image: Image, tmp_path: Path) -> None:
    (layer,) = read(busybox_image).layers
    found = members(layer)
    assert {"bin/busybox", "bin/sh", "bin/sleep", "bin/taskset", "bin/cat"} <= found.keys()
    assert found["bin/sh"].linkname == "busybox"
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        files.extract("bin/busybox", tmp_path, filter="tar")
    linked = subprocess.run(["ldd", tmp_path / "bin/busybox"], capture_output=True, text=True, check=False)
    assert "not a dynamic executable" in linked.stderr


def test_a_pods_sandbox_runs_one_program_of_the_same_layer(busybox_image: Image) -> None:
    image = read(pause())
    assert image.layers == read(busybox_image).layers
    assert image.config["config"]["Entrypoint"] == ["/bin/sleep", "inf"]


def test_the_disk_of_vms_belongs_to_kubevirts_user_and_boots_into_a_halt() -> None:
    (layer,) = read(container_disk()).layers
    found = members(layer)
    assert {(member.uid, member.gid) for member in found.values()} == {(107, 107)}
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        disk = files.extractfile("disk/disk.img")
        assert disk is not None
        boot_sector = disk.read(512)
    assert boot_sector[510:] == b"\x55\xaa", "a BIOS would not boot from it"
    enable_interrupts, halt, jump, distance = boot_sector[:4]
    assert (enable_interrupts, halt, jump) == (0xFB, 0xF4, 0xEB)
    assert 4 + distance - 256 == 1, "after each interrupt it halts again"


def test_the_scheduler_of_a_pod_does_not_end_with_its_standard_input(
    node_programs: NodePrograms, tmp_path: Path
) -> None:
    image = read(kube_scheduler())
    assert image.reference == "registry.k8s.io/kube-scheduler:v1.36.3"
    with tarfile.open(fileobj=io.BytesIO(image.layers[0])) as files:
        files.extract("usr/local/bin/kube-scheduler", tmp_path, filter="tar")
    program = tmp_path / "usr/local/bin/kube-scheduler"
    assert program.stat().st_size == node_programs.kube_scheduler.stat().st_size
    done = subprocess.run(
        [program, "--config=/nonexistent/configuration.yaml"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "/nonexistent/configuration.yaml" in done.stderr
