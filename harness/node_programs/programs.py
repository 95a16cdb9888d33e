"""The programs of a real node: containerd and its parts, the kubelet, KubeVirt's node components.

The Go modules hold no code of ours: each names the upstream programs as its tools. `runc` and what the
programs call on the node (iproute2, nftables) are Debian's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.build_cache import NotInstalled, Say, say_to_stderr
from harness.go_build import GoModule, built

_HERE = Path(__file__).parent
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONTAINERD = GoModule(
    _HERE / "containerd",
    contents="containerd, its shim, ctr and three CNI plugins",
    ldflags="-s -w -X github.com/containerd/containerd/v2/version.Version=v2.2.9",
    tags="no_btrfs no_zfs no_aufs no_devmapper no_tracing",
    packages="tool",
)
KUBELET = GoModule(
    _HERE / "kubelet",
    contents="kubelet, kube-proxy and a kube-scheduler for a container",
    ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3",
    packages="tool",
)
# In a module of its own: it asks for newer versions than the kubelet's, which would be compiled twice.
CRICTL = GoModule(_HERE / "crictl", contents="crictl", packages="tool")
KUBEVIRT_NODE = GoModule(
    _HERE / "kubevirt_node",
    contents="KubeVirt's virt-handler, virt-launcher and the programs that they call",
    tags="netgo osusergo selinux",
    packages="tool",
    cgo=True,
    libraries=("libvirt", "libvirt-qemu", "libvirt-lxc"),
    substitutes=tuple(
        _HERE.parent / "control_plane" / "kubevirt" / "substitutes" / name
        for name in ("virt-template-api", "virt-template-client-go")
    ),
)
# Not a program of every node: only its own test needs it.
DRA_DRIVER_CPU = GoModule(_HERE / "dra_driver_cpu", contents="dra-driver-cpu", packages="tool")
NODE_MODULES = (CONTAINERD, CRICTL, KUBELET, KUBEVIRT_NODE)


@dataclass(frozen=True, slots=True)
class NodePrograms:
    """Where the programs of a node are; all of them run as they are, from where they are."""

    containerd: Path
    shim: Path
    """containerd-shim-runc-v2; containerd finds it beside itself or on PATH."""
    ctr: Path
    crictl: Path
    runc: Path
    cni_folder: Path
    """Holds ptp, host-local and loopback, among others."""
    kubelet: Path
    kube_proxy: Path
    kube_scheduler: Path
    """For the image: the control plane's own ends with its standard input, which a container has not."""
    virt_handler: Path
    virt_chroot: Path
    """virt-handler searches for it at /usr/bin/virt-chroot."""

    @property
    def search_path(self) -> str:
        """The PATH for programs that call each other."""
        folders = dict.fromkeys(str(path.parent) for path in (self.containerd, self.crictl, self.runc))
        return ":".join([*folders, _SYSTEM_FOLDERS])


def node_programs(say: Say = say_to_stderr) -> NodePrograms:
    """Return a node's programs, built unless they are cached; raises `BuildFailed` when one cannot be had."""
    containerd, crictl, kubelet, kubevirt = (built(module, say) for module in NODE_MODULES)
    return NodePrograms(
        containerd=containerd / "containerd",
        shim=containerd / "containerd-shim-runc-v2",
        ctr=containerd / "ctr",
        crictl=crictl / "crictl",
        runc=system_program("runc", package="runc"),
        cni_folder=containerd,
        kubelet=kubelet / "kubelet",
        kube_proxy=kubelet / "kube-proxy",
        kube_scheduler=kubelet / "kube-scheduler",
        virt_handler=kubevirt / "virt-handler",
        virt_chroot=kubevirt / "virt-chroot",
    )


def system_program(name: str, package: str) -> Path:
    """Return the path of a program that Debian's `package` installs; raises `NotInstalled` without it."""
    found = shutil.which(name, path=_SYSTEM_FOLDERS)
    if found is None:
        raise NotInstalled(
            f"no {name} on this machine: install the package {package} (./make test does, as root)"
        )
    return Path(found).resolve()
