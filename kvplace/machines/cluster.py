"""The cluster that somebody wants to look at offline: its nodes, and the VMs that run there already.

    nodes:
    - name: worker            # worker-01 to worker-50
      count: 50
      machine: 2x-epyc-9354   # one that comes with kvplace
    - name: edge
      topology: edge.json     # a NodeTopology, or a folder or archive with a machine's sys/
      running:
      - id: db
        request: {vcpus: 8, cpuSet: one-numa}
        cpus: 2-5,34-37       # left out: where kvplace would put it

Paths are relative to the document. YAML or JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody, BadTopology
from kvplace.core.free import free_of
from kvplace.core.occupant import Occupant
from kvplace.core.refusal import Refusal
from kvplace.core.strict_json import shown
from kvplace.core.topology import Topology
from kvplace.documents.reading import Part, load_document
from kvplace.machines.machine import read_machine_at
from kvplace.machines.shipped import machine_names, read_machine

MOST_NODES = 10_000
_MOST_RUNNING = 4096


def load_cluster(path: Path) -> tuple[ClusterNode, ...]:
    """Read a cluster document; raises BadBody that names the file and the path of the key."""
    document = load_document(path)
    try:
        document.only("nodes")
        return cluster_of(document, path.parent)
    except BadBody as error:
        raise BadBody(f"{path}: {error}") from None


def cluster_of(document: Part, folder: Path) -> tuple[ClusterNode, ...]:
    """Read the key `nodes` of a document that lies in a folder."""
    read_at = cache(lambda path: read_machine_at(folder / path).topology)
    found: list[ClusterNode] = []
    names: dict[str, str] = {}
    for part in document.parts("nodes", MOST_NODES):
        for node in _nodes(part, read_at):
            if node.name in names:
                raise BadBody(
                    f"{part.path('name')}: a node {node.name!r} stands in {names[node.name]} already; "
                    "give it another name"
                )
            names[node.name] = part.where
            found.append(node)
        if len(found) > MOST_NODES:
            raise BadBody(f"{part.where}: there are more than {MOST_NODES} nodes")
    if not found:
        raise BadBody("nodes is empty or missing; list at least one node")
    return tuple(found)


def _nodes(part: Part, read_at: Callable[[str], Topology]) -> Iterable[ClusterNode]:
    part.only("name", "count", "machine", "topology", "running")
    name = part.text("name")
    if not name:
        raise part.bad("name", "give the node a name")
    topology = _topology(part, read_at)
    running = _running(part, topology)
    if "count" not in part.keys:
        return [ClusterNode(name, topology, running)]
    count = part.count("count", 1, MOST_NODES, 1)
    if running:
        raise BadBody(f"{part.path('running')} needs a node of its own; leave out {part.path('count')}")
    width = max(2, len(str(count)))
    return [ClusterNode(f"{name}-{number:0{width}d}", topology) for number in range(1, count + 1)]


def _topology(part: Part, read_at: Callable[[str], Topology]) -> Topology:
    if ("machine" in part.keys) == ("topology" in part.keys):
        raise BadBody(
            f"{part.where} must have either machine ({', '.join(machine_names())}) or topology (a file)"
        )
    key = "machine" if "machine" in part.keys else "topology"
    text = part.text(key)
    try:
        return read_machine(text) if key == "machine" else read_at(text)
    except (BadTopology, BadBody) as error:
        raise BadBody(f"{part.path(key)}: {error}") from None


def _running(part: Part, topology: Topology) -> tuple[Occupant, ...]:
    """Put the VMs where the document says that they are, then the others where kvplace would."""
    parts = part.parts("running", _MOST_RUNNING)
    found: dict[str, Occupant] = {}
    for vm in sorted(parts, key=lambda vm: "cpus" not in vm.keys):
        vm.only("id", "request", "cpus")
        name = vm.text("id")
        if not name or name in found:
            raise vm.bad("id", "every VM of a node needs an id of its own")
        found[name] = _placed(vm, ClusterNode(name, topology, tuple(found.values())))
    return tuple(found[vm.text("id")] for vm in parts)


def _placed(vm: Part, node: ClusterNode) -> Occupant:
    request = vm.part("request").request()
    given = _cpus(vm) if "cpus" in vm.keys else None
    placement = place(node.topology, free_of(node.topology, node.ledger, only=given), request)
    if isinstance(placement, Refusal):
        where = "" if given is None else f" on CPUs {format_cpu_list(given)}"
        raise BadBody(f"{vm.where}: the VM does not fit{where} beside those before it: {placement.message}")
    if given is not None and given != placement.cpus | placement.owned:
        raise vm.bad("cpus", f"the VM takes only {format_cpu_list(placement.cpus | placement.owned)} of them")
    return Occupant(node.name, request, placement)


def _cpus(vm: Part) -> int:
    value = vm.keys["cpus"]
    if not isinstance(value, str):
        raise BadBody(f"{vm.path('cpus')} is {shown(value)}; it must be a CPU list such as '0-7'")
    try:
        return parse_cpu_list(value, what=vm.path("cpus"))
    except ValueError as error:
        raise BadBody(str(error)) from None
