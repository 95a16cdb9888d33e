"""How the programs of a node reach the control plane, which runs outside of the node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.real_node.sandbox import Sandbox

CA_FILE = "/etc/kubernetes/ca.crt"


def apiserver_flags(first: Sandbox) -> tuple[str, ...]:
    """Return the further flags of the API server when nodes are real."""
    return (
        # The nodes' links come and go; no client is anonymous there either.
        "--bind-address=0.0.0.0",
        # Pods of every node can reach it: the address of this machine on one of its links.
        f"--advertise-address={first.gateway}",
        # Beside RBAC: a kubelet has the rights of its own node only.
        "--authorization-mode=Node",
        "--kubelet-preferred-address-types=InternalIP",
    )


class NodeAccess:
    """The control plane as seen from one node."""

    def __init__(self, plane: ControlPlane, sandbox: Sandbox) -> None:
        """Put the cluster's CA into the node."""
        self._url = f"https://{sandbox.gateway}:{plane.url.rpartition(':')[2]}"
        sandbox.write(CA_FILE, plane.ca_file.read_text())

    @property
    def url(self) -> str:
        """The API server's address."""
        return self._url

    def kubeconfig(self, outside: Path) -> str:
        """Rewrite a kubeconfig of this machine for the node."""
        content: dict[str, Any] = json.loads(outside.read_text())
        for entry in content["clusters"]:
            # Its certificate names this machine's loopback addresses.
            entry["cluster"] = {
                "server": self._url,
                "tls-server-name": "localhost",
                "certificate-authority": CA_FILE,
            }
        return json.dumps(content)
