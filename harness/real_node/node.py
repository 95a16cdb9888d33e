"""A real node: a sandbox with containerd, a kubelet, and KubeVirt's virt-handler.

Half of its start needs no cluster (sandbox, images, KubeVirt's node-labeller), so it can run beside the
start of the control plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.node_programs.programs import NodePrograms
from harness.real_node.kube_proxy import KubeProxy
from harness.real_node.kubelet import Kubelet
from harness.real_node.node_access import NodeAccess
from harness.real_node.runtime import ContainerRuntime
from harness.real_node.sandbox import Sandbox
from harness.real_node.virt_handler import VirtHandler, label_node


class RealNode:
    """One node."""

    def __init__(self, sandbox: Sandbox, programs: NodePrograms, images: Iterable[Path]) -> None:
        """Start containerd, import the images, and run the node-labeller; it all ends with the sandbox."""
        self.name = sandbox.name
        self.sandbox = sandbox
        self.runtime = ContainerRuntime(sandbox, programs)
        for image in images:
            self.runtime.import_image(image)
        label_node(self.runtime)

    def join(self, plane: ControlPlane, *, kubelet_configuration: Mapping[str, Any] | None = None) -> None:
        """Start kubelet, kube-proxy and virt-handler, and wait until VMs can be scheduled to the node."""
        access = NodeAccess(plane, self.sandbox)
        self.kubelet = Kubelet(plane, access, self.runtime, configuration=kubelet_configuration)
        self.kube_proxy = KubeProxy(plane, access, self.runtime)
        self.kubelet.wait_until_ready()
        self.virt_handler = VirtHandler(plane, access, self.runtime)
        self.virt_handler.wait_until_schedulable()
