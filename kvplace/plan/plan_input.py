"""The input of a plan: the nodes of its cluster, and the VMs, as JSON lines or as a list in JSON or YAML.

    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "memory": "32Gi"}
    {"id": "web", "vcpus": 2, "count": 20}

A VM without an id is named by its position: request-1, request-2, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from kvplace.core.cluster.draft import OPEN, ClosedNodes
from kvplace.core.cluster.planning import VmRequest
from kvplace.core.errors import BadBody
from kvplace.core.occupant import ClusterNode
from kvplace.core.strict_json import json_object
from kvplace.documents.cluster import CLUSTER_EXAMPLE, ClusterDocument
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import read_document, read_value
from kvplace.documents.request import MOST_VMS, RequestedVms, RequestsDocument
from kvplace.kube.node_filters import PodDemands, demands_of
from kvplace.machines.cluster import load_cluster, nodes_of

ClosedTo: TypeAlias = Callable[[PodDemands], ClosedNodes]


def vm_requests_of(
    text: str, what: str, running: Iterable[str] = (), closed_to: ClosedTo | None = None
) -> tuple[VmRequest, ...]:
    """Read requests from a text; raises BadBody that names the place in `what`.

    `running` are the ids of VMs that run already. `closed_to` names the nodes of a live cluster that VMs
    with certain demands never go; other nodes have no labels and taints, so a request may then demand
    nothing.
    """
    found: dict[str, VmRequest] = {}
    known = set(running)
    closed: dict[str, ClosedNodes] = {}
    for number, (where, vms) in enumerate(_entries(text, what), start=1):
        demands = vms.demands
        if demands and closed_to is None:
            raise BadBody(
                f"{where}: {next(iter(demands))} needs the labels and taints of a live cluster; plan with "
                "--live, or leave it out"
            )
        key = json.dumps(demands, sort_keys=True)
        if key not in closed:
            closed[key] = OPEN if closed_to is None else closed_to(demands_of(demands, where))
        for name in numbered(vms.id or f"request-{number}", vms.count):
            if name in known:
                raise BadBody(f"{where}: a VM {name!r} runs in the cluster already; use another id")
            if name in found:
                raise BadBody(f"{where}: duplicate VM id {name!r}")
            found[name] = VmRequest(name, vms.request, closed[key])
        if len(found) > MOST_VMS:
            raise BadBody(f"{what} contains more than {MOST_VMS} VMs; plan fewer at once")
    if not found:
        raise BadBody(f'{what} contains no requests; write one per line, for example {{"vcpus": 8}}')
    return tuple(found.values())


def _entries(text: str, what: str) -> Iterator[tuple[str, RequestedVms]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        return
    if _is_request(lines[0][1]):
        for number, line in lines:
            where = f"{what}: line {number}"
            yield where, read_model(RequestedVms, json_object(line, what=where, like='{"vcpus": 8}'), where)
        return
    content = read_value(text, what)
    document = {"requests": content} if isinstance(content, list) else content
    for number, vms in enumerate(read_model(RequestsDocument, document, what).requests):
        yield f"{what}: requests[{number}]", vms


def _is_request(line: str) -> bool:
    """Whether the first line is a request by itself; else the text is one document."""
    try:
        return line.lstrip().startswith("{") and "requests" not in json_object(line, what="")
    except BadBody:
        # A request with a mistake; with its line, the mistake can be named.
        return line.strip().startswith("{") and line.rstrip().endswith("}")


def read_plan_cluster(path: str | None) -> tuple[ClusterNode, ...]:
    """Read the nodes of a cluster, None for the example; raises BadBody that names file and key."""
    if path is not None:
        return load_cluster(Path(path))
    what = "the example cluster"
    return nodes_of(read_model(ClusterDocument, read_document(CLUSTER_EXAMPLE, what), what), Path())
