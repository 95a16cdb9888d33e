"""A cluster of real nodes: control plane, KubeVirt, and nodes that run what is scheduled to them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.node_programs.programs import NodePrograms
from harness.real_node.node import RealNode
from harness.real_node.node_access import APISERVER_FLAGS
from harness.real_node.sandbox import connect
from harness.real_node.virt_handler import prepare_cluster

_KUBEVIRT = {
    # No /dev/kvm on most machines that run tests.
    "developerConfiguration": {"useEmulation": True, "logVerbosity": {"virtLauncher": 3}},
    # The default one needs links of type dummy, which kernels of test machines may lack.
    "network": {"defaultNetworkInterface": "masquerade"},
    # The images are on the nodes, and nowhere else.
    "imagePullPolicy": "IfNotPresent",
}


class RealCluster:
    """A running cluster; use it as a context manager, or call `stop`."""

    def __init__(
        self,
        programs: NodePrograms,
        kubevirt_programs: Path,
        images: Sequence[Path],
        logs: Path,
        *,
        kubelets: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Start everything and wait until VMs can be scheduled to every node.

        Args:
            programs: those of a node.
            kubevirt_programs: the folder of KubeVirt's programs for the control plane.
            images: OCI archives that every node gets; virt-launcher's is one of them.
            logs: folder that keeps the logs of all servers.
            kubelets: the nodes' names, and what is put over each kubelet's configuration.
        """
        self._stack = contextlib.ExitStack()
        try:
            threads = self._stack.enter_context(ThreadPoolExecutor(len(kubelets)))
            starting = [threads.submit(RealNode, name, logs, programs, images) for name in kubelets]
            # Also those whose start ends after something else has failed.
            for node in starting:
                self._stack.callback(_stop_when_started, node)
            self.plane = self._stack.enter_context(
                ControlPlane(controller_manager=True, apiserver_flags=APISERVER_FLAGS, logs=logs)
            )
            self.plane.add_scheduler()
            self.kubevirt = self._stack.enter_context(
                KubeVirt(self.plane, kubevirt_programs, configuration=_KUBEVIRT, plugins_crd=True)
            )
            prepare_cluster(self.plane)
            self.nodes = {name: node.result() for name, node in zip(kubelets, starting, strict=True)}
            for first, second in combinations(self.nodes.values(), 2):
                connect(first.sandbox, second.sandbox)
            joining = [
                threads.submit(self.nodes[name].join, self.plane, kubelet_configuration=configuration)
                for name, configuration in kubelets.items()
            ]
            for joined in joining:
                joined.result()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything and remove all data but the logs; may be called twice."""
        self._stack.close()


def _stop_when_started(node: Future[RealNode]) -> None:
    with contextlib.suppress(Exception):  # What went wrong has been reported by whoever wanted the node.
        node.result().stop()
