"""The NodeTopology object: the machine behind a node as it stands in the cluster and on stdout.

`kvplace topology -o json` prints exactly what `kubectl get nodetopology -o json` would, so that either
can be given to every command that takes a machine.
"""

from __future__ import annotations

from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.topology import Topology
from kvplace.core.topology_document import topology_document

API_VERSION = "kvplace.io/v1alpha1"
KIND = "NodeTopology"


def node_topology(name: str, topology: Topology, kubelet_cpus: int = 0) -> dict[str, Any]:
    """Write a machine as the NodeTopology of the node of that name.

    `kubelet_cpus` are those that the kubelet's own static policy holds; they are the object's status.
    """
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": topology_document(topology),
    }
    if kubelet_cpus:
        document["status"] = {"kubeletCpus": format_cpu_list(kubelet_cpus)}
    return document
