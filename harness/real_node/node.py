"""A real node: a sandbox with containerd, a kubelet, and KubeVirt's virt-handler.

Half of its start needs no cluster (sandbox, images, KubeVirt's node-labeller), so it can go on beside the
start of the control plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from harness.control_plane.cluster import ControlPlane
from harness.node_programs.programs import NodePrograms
from harness.real_node.kubelet import Kubelet
from harness.real_node.node_access import NodeAccess
from harness.real_node.runtime import ContainerRuntime
from harness.real_node.sandbox import Sandbox
from harness.real_node.virt_handler import VirtHandler, label_node


class RealNode:
    """One node; use it as a context manager, or call `stop`."""

    def __init__(self, name: str, folder: Path, programs: NodePrograms, images: Iterable[Path]) -> None:
        """Start sandbox and containerd, import the images, and run the node-labeller."""
        self.name = name
        self.sandbox = Sandbox(name, folder)
        try:
            self.runtime = ContainerRuntime(self.sandbox, programs)
            for image in images:
                self.runtime.import_image(image)
            label_node(self.runtime)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything on the node and remove it; its objects in the cluster stay."""
        self.sandbox.stop()

    def join(self, plane: ControlPlane, *, kubelet_configuration: Mapping[str, Any] | None = None) -> None:
        """Start the kubelet and virt-handler, and wait until VMs can be scheduled to the node."""
        access = NodeAccess(plane, self.sandbox)
        self.kubelet = Kubelet(plane, access, self.runtime, configuration=kubelet_configuration)
        self.kubelet.wait_until_ready()
        self.virt_handler = VirtHandler(plane, access, self.runtime)
        self.virt_handler.wait_until_schedulable()
