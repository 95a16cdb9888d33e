"""The Debian packages that the tests need, each with its reason, installed where that is allowed.

Runs apt-get as root, or through sudo when it asks no password. Where neither is there the tests state
themselves which tests they skip and why; under CI that is an error instead.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from dev.step import StepFailed, in_ci, run, say

# libvirt-python is built on the machine: without the compiler and headers there is no wheel to take.
COMPILER = {
    "gcc": "builds libvirt-python",
    "libc6-dev": "the C library's headers",
    "libvirt-dev": "libvirt's headers",
    "pkg-config": "finds them",
}
# Parts of kvplace's images, and the program that makes these small.
IMAGES = {"libvirt0": "the library through which the agent asks libvirt", "binutils": "strip"}
REAL_MACHINES = {
    "libvirt-daemon": "the libvirtd that the session tests start as KubeVirt does",
    "libvirt-daemon-driver-qemu": "its driver",
    "qemu-system-x86": "the QEMU with the threads that are read back",
    "seabios": "the firmware of guests",
    "busybox-static": "the first programs of an emulated machine, before it has this one's files",
    "hwloc-nox": "lstopo, for comparing its view of a machine with ours",
}
# Shells for testing the completion of words.
SHELLS = {"zsh": "completes as its script states", "fish": "the same"}
# Whole nodes run on this machine: containerd, kubelet and virt-handler with their pods.
REAL_NODES = {
    "runc": "starts containers for containerd",
    "iproute2": "the links between nodes",
    "nftables": "KubeVirt's pod networks",
    "busybox-static": "runs in the pods of tests",
    "libvirt-clients": "virsh in virt-launcher's image",
    "qemu-utils": "qemu-img in virt-launcher's image",
}
PUBLISHING = {"skopeo": "copies images into a registry, as docs/install.md states"}
BROWSERS = {
    "chromium-headless-shell": "the browser that tests the pages of the web map",
    "fonts-dejavu-core": "letters in its pictures",
}

EVERYTHING = {
    **COMPILER,
    **IMAGES,
    **REAL_MACHINES,
    **SHELLS,
    **BROWSERS,
    **PUBLISHING,
    **REAL_NODES,
}
_NODE = {**COMPILER, **IMAGES, **REAL_MACHINES, **REAL_NODES}
BY_FOLDER = {
    "cli": SHELLS,
    "domainxml": IMAGES,  # libvirt's schemas come with its library
    "emulated_machine": REAL_MACHINES,
    "end_to_end": BROWSERS,
    "libvirt_session": _NODE,
    "node_programs": _NODE,
    "real_node": _NODE,
    "release": {**IMAGES, **PUBLISHING},
    "web": BROWSERS,
}
"""The packages of each folder of tests/ that needs any."""
FOUND_BY_COMMAND = {"gcc": "gcc", "pkg-config": "pkg-config"}


def needed_by(arguments: Sequence[str]) -> dict[str, str]:
    """Return the packages that the tests need which these arguments of pytest select."""
    folders = [
        Path(argument.partition("::")[0]).parts
        for argument in arguments
        if argument.startswith(("tests", "./tests"))
    ]
    if not folders or ("tests",) in folders:
        return EVERYTHING
    return {
        package: reason
        for _tests, folder, *_rest in folders
        for package, reason in BY_FOLDER.get(folder, {}).items()
    }


def ensure(packages: dict[str, str]) -> None:
    """Installs missing packages, or reports why it cannot."""
    missing = [name for name in packages if not _installed(name)]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        _without(missing, "this is not Debian: there is no apt-get")
        return
    prefix = _as_root()
    if prefix is None:
        _without(missing, "neither root nor sudo without a password")
        return
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    environment = [f"{key}={value}" for key, value in quiet.items()]
    apt = [*prefix, "env", *environment, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
    run("reading Debian's package lists", [*apt, "update"])
    # No services are wanted, only programs: policy-rc.d is not touched, the tests start their own daemons.
    run(
        f"installing Debian packages: {' '.join(missing)}",
        [*apt, "install", "-y", "--no-install-recommends", *missing],
    )


def can_compile() -> bool:
    """Whether libvirt-python can be built here."""
    return all(_installed(name) for name in (*COMPILER, *python_headers()))


def python_headers() -> dict[str, str]:
    """Names the package with Python.h when this Python is Debian's own and came without it."""
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return {}
    return {f"python{sysconfig.get_python_version()}-dev": "Python's headers"}


def _installed(name: str) -> bool:
    if (command := FOUND_BY_COMMAND.get(name)) and shutil.which(command):
        return True
    if shutil.which("dpkg-query") is None:
        return False
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f=${db:Status-Status}", name],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return answer.stdout.strip() == "installed"


def _as_root() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def _without(missing: list[str], why: str) -> None:
    sentence = f"missing here and not installable ({why}): {' '.join(missing)}"
    if in_ci():
        raise StepFailed(sentence)
    say(f"{sentence}; the tests that need them will be skipped")
