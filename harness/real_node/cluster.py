"""A cluster of real nodes: control plane, KubeVirt, and nodes that run what is scheduled to them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import FEATURE_GATES, KubeVirt
from harness.node_programs.programs import NodePrograms
from harness.real_node.node import RealNode
from harness.real_node.node_access import apiserver_flags
from harness.real_node.sandbox import Sandbox, connect
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
        feature_gates: Sequence[str] = FEATURE_GATES,
    ) -> None:
        """Start everything and wait until VMs can be scheduled to every node.

        Args:
            programs: the programs of a node.
            kubevirt_programs: the folder of KubeVirt's programs for the control plane.
            images: OCI archives that every node gets; virt-launcher's is one of them.
            logs: folder that keeps the logs of all servers.
            kubelets: the nodes' names, and what is put over each kubelet's configuration.
            feature_gates: KubeVirt's.
        """
        self._stack = contextlib.ExitStack()
        try:
            sandboxes = [self._stack.enter_context(Sandbox(name, logs)) for name in kubelets]
            for first, second in combinations(sandboxes, 2):
                connect(first, second)
            threads = self._stack.enter_context(ThreadPoolExecutor(len(sandboxes)))
            starting = [threads.submit(RealNode, sandbox, programs, images) for sandbox in sandboxes]
            self.plane = self._stack.enter_context(
                ControlPlane(
                    controller_manager=True,
                    service_account_admission=True,
                    apiserver_flags=apiserver_flags(sandboxes[0]),
                    # This machine, where the API server runs, reaches Services through the first node.
                    service_subnet=sandboxes[0].service_subnet,
                    logs=logs,
                )
            )
            self.plane.add_scheduler()
            self.kubevirt = self._stack.enter_context(
                KubeVirt(
                    self.plane,
                    kubevirt_programs,
                    feature_gates=feature_gates,
                    configuration=_KUBEVIRT,
                    plugins_crd=True,
                )
            )
            prepare_cluster(self.plane)
            self.nodes = {name: node.result() for name, node in zip(kubelets, starting, strict=True)}
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
