"""The kubelet of a sandboxed node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.real_node.node_access import NodeAccess
from harness.real_node.runtime import CONTAINERD_SOCKET, ContainerRuntime

# Where kubeadm puts it, and others search for it.
_CONFIGURATION_FILE = "/var/lib/kubelet/config.yaml"
_CONFIGURATION: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "failCgroupV1": False,
    "cgroupDriver": "cgroupfs",
    "enforceNodeAllocatable": ["pods"],
    "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "failSwapOn": False,
    # The disk is this machine's: how full it is must not decide a test.
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
    "imageGCHighThresholdPercent": 100,
    "imageGCLowThresholdPercent": 99,
    # virt-launcher does not start with the search list of most machines, ".".
    "resolvConf": "/etc/kubernetes/resolv.conf",
    "clusterDNS": ["10.96.0.10"],
    "clusterDomain": "cluster.local",
    # Settings of the whole machine that it may not change are not an error then.
    "featureGates": {"KubeletInUserNamespace": True},
    "syncFrequency": "10s",
    "nodeStatusUpdateFrequency": "5s",
    "serializeImagePulls": False,
}


class Kubelet:
    """A running kubelet, registered with the control plane."""

    def __init__(
        self,
        plane: ControlPlane,
        access: NodeAccess,
        runtime: ContainerRuntime,
        *,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        """Start it; `configuration` is put over ours.

        The kubelet makes its node. `wait_until_ready` returns when pods can run on it.
        """
        self._plane = plane
        self._sandbox = runtime.sandbox
        self._programs = runtime.programs
        self._sandbox.write("/etc/kubernetes/resolv.conf", "nameserver 10.96.0.10\nsearch cluster.local\n")
        self._sandbox.write(_CONFIGURATION_FILE, json.dumps({**_CONFIGURATION, **(configuration or {})}))
        kubeconfig = access.kubeconfig(
            plane.kubeconfig_for(
                plane.admin.token,
                name=f"kubelet-{self._sandbox.name}",
                as_user=f"system:node:{self._sandbox.name}",
                as_groups=["system:nodes"],
            )
        )
        self._sandbox.write("/etc/kubernetes/kubelet.kubeconfig", kubeconfig, mode=0o600)
        self.start()

    def start(self) -> None:
        """Start it (again, after `server.kill()`)."""
        self.server = self._sandbox.start(
            "kubelet",
            self._programs.kubelet,
            f"--config={_CONFIGURATION_FILE}",
            "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
            f"--hostname-override={self._sandbox.name}",
            f"--node-ip={self._sandbox.address}",
            "--v=2",
            environment={"PATH": self._programs.search_path},
        )

    def wait_until_ready(self) -> None:
        """Wait until the node reports that it is Ready."""
        self.server.wait_until(self._is_ready, "condition Ready of its node")

    def _is_ready(self) -> bool:
        try:
            node = self._plane.request("GET", f"/api/v1/nodes/{self._sandbox.name}")
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return False
        conditions = {entry["type"]: entry["status"] for entry in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True"
