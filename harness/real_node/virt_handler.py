"""KubeVirt on a sandboxed node: its node-labeller, once, and virt-handler.

virt-handler runs as a process of the node, with the rights of KubeVirt's own roles and a token bound to its
node, as its DaemonSet has it. Its other files of the pod are put at their paths on the node.
"""

from __future__ import annotations

import contextlib

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.kubevirt_parts import NAMESPACE
from harness.real_node.node_access import NodeAccess
from harness.real_node.runtime import ContainerRuntime

LAUNCHER_IMAGE = "kubevirt.test/virt-launcher:latest"

_ACCOUNT = "kubevirt-handler"
_LABELLER_FOLDER = "/var/lib/kubevirt-node-labeller"
_CERTIFICATES = {
    "clientcertificates": "client:virt-handler",
    "servercertificates": "node:virt-handler",
    "migrationservercertificates": "client:migration",
    "vsockclientcertificates": "client:vsock",
}
_SCHEDULABLE = "kubevirt.io/schedulable"
_ONE_DAY_S = 86_400


def label_node(runtime: ContainerRuntime) -> None:
    """Ask the launcher image's libvirt which CPUs this node can emulate (5 s), for virt-handler's labels.

    Needs the launcher image on the node, and nothing of the cluster.
    """
    runtime.sandbox.run("mkdir", "-p", _LABELLER_FOLDER)
    runtime.ctr(
        *("run", "--rm", "--privileged", "--net-host", f"--runc-binary={runtime.programs.runc}"),
        "--user=0:0",
        *("--env", "HYPERVISOR_DEVICE=nokvm", "--env", "PREFERRED_VIRTTYPE=qemu"),
        "--mount",
        f"type=bind,src={_LABELLER_FOLDER},dst={_LABELLER_FOLDER},options=rbind:rw",
        *(LAUNCHER_IMAGE, "node-labeller", "bash", "/usr/bin/node-labeller.sh"),
    )


def prepare_cluster(plane: ControlPlane) -> None:
    """Publish the CA that virt-handlers trust each other by; harmless when it is there."""
    with contextlib.suppress(RequestRefused):
        plane.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/configmaps",
            {"metadata": {"name": "kubevirt-ca"}, "data": {"ca-bundle": plane.ca_file.read_text()}},
        )


class VirtHandler:
    """A running virt-handler."""

    def __init__(self, plane: ControlPlane, access: NodeAccess, runtime: ContainerRuntime) -> None:
        """Start it; the node's object must exist. `wait_until_schedulable` returns when VMs can come."""
        self._plane = plane
        self._sandbox = runtime.sandbox
        self._programs = runtime.programs
        for folder, name in _CERTIFICATES.items():
            certificate, key = plane.issue_certificate(f"kubevirt.io:system:{name}")
            self._sandbox.write(f"/etc/virt-handler/{folder}/tls.crt", certificate.read_text())
            self._sandbox.write(f"/etc/virt-handler/{folder}/tls.key", key.read_text(), mode=0o600)
        kubeconfig = plane.kubeconfig_for(self._token(), name=f"virt-handler-{self._sandbox.name}")
        self._sandbox.write("/etc/virt-handler/kubeconfig", access.kubeconfig(kubeconfig), mode=0o600)
        for shared in ("kubevirt", "kubevirt-private", "kubevirt-libvirt-runtimes"):
            self._sandbox.path(f"/run/{shared}").mkdir(exist_ok=True)
        self._sandbox.run("cp", self._programs.virt_chroot, "/usr/bin/virt-chroot")
        self._sandbox.run("sh", "-c", _ADD_QEMU_USER)
        self.start()

    def start(self) -> None:
        """Start it (again, after `server.kill()`)."""
        self.server = self._sandbox.start(
            "virt-handler",
            self._programs.virt_handler,
            "--kubeconfig=/etc/virt-handler/kubeconfig",
            "--port=8443",
            f"--hostname-override={self._sandbox.name}",
            f"--pod-ip-address={self._sandbox.address}",
            "--max-metric-requests=3",
            "--console-server-port=8186",
            "--vmstats-server-port=8187",
            "--graceful-shutdown-seconds=1",
            "-v=4",
        )

    def wait_until_schedulable(self) -> None:
        """Wait until KubeVirt's label offers the node to VMs."""
        self.server.wait_until(self._is_schedulable, f"label {_SCHEDULABLE} on its node")

    def _is_schedulable(self) -> bool:
        node = self._plane.request("GET", f"/api/v1/nodes/{self._sandbox.name}")
        return bool(node["metadata"]["labels"].get(_SCHEDULABLE) == "true")

    def _token(self) -> str:
        # KubeVirt's admission wants to read from the token which node it is.
        node = {"apiVersion": "v1", "kind": "Node", "name": self._sandbox.name}
        answer = self._plane.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{_ACCOUNT}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": _ONE_DAY_S, "boundObjectRef": node},
            },
        )
        return str(answer["status"]["token"])


# KubeVirt's images run QEMU as 107; virt-handler finds the user by its name.
_ADD_QEMU_USER = """\
grep -q ^qemu: /etc/passwd || echo qemu:x:107:107:qemu:/:/bin/false >>/etc/passwd
grep -q ^qemu: /etc/group || echo qemu:x:107: >>/etc/group
"""
