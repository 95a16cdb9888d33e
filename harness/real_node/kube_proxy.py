"""kube-proxy on a sandboxed node: Services, for its pods and other senders of traffic."""

from __future__ import annotations

import json
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.real_node.node_access import NodeAccess
from harness.real_node.runtime import ContainerRuntime

_CONFIGURATION_FILE = "/var/lib/kube-proxy/config.yaml"
_CONFIGURATION: dict[str, Any] = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "mode": "nftables",
    "clientConnection": {"kubeconfig": "/var/lib/kube-proxy/kubeconfig"},
    # Every sandbox's pods: traffic from elsewhere, as the API server's, has to come back the same way.
    "clusterCIDR": "198.19.0.0/16",
    # Connection tracking is set for the whole machine: leave it alone.
    "conntrack": {
        "maxPerCore": 0,
        "min": 0,
        "tcpEstablishedTimeout": "0s",
        "tcpCloseWaitTimeout": "0s",
    },
}


class KubeProxy:
    """A running kube-proxy."""

    def __init__(self, plane: ControlPlane, access: NodeAccess, runtime: ContainerRuntime) -> None:
        """Start it; it answers for Services as soon as it has read them."""
        sandbox = runtime.sandbox
        kubeconfig = plane.kubeconfig_for(
            plane.admin.token, name=f"kube-proxy-{sandbox.name}", as_user="system:kube-proxy"
        )
        sandbox.write("/var/lib/kube-proxy/kubeconfig", access.kubeconfig(kubeconfig), mode=0o600)
        sandbox.write(_CONFIGURATION_FILE, json.dumps(_CONFIGURATION))
        self.server = sandbox.start(
            "kube-proxy",
            runtime.programs.kube_proxy,
            f"--config={_CONFIGURATION_FILE}",
            f"--hostname-override={sandbox.name}",
            environment={"PATH": runtime.programs.search_path},
        )
