"""The input of one `kvplace simulate`: the nodes and the load of a scenario document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import BadBody
from kvplace.core.huge_pages import plain_bytes
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import load_document, read_document, source_name
from kvplace.documents.scenario import EXAMPLE, MOST_REQUESTS, ScenarioDocument, VmEntry
from kvplace.machines.cluster import nodes_of
from kvplace.simulate.load import Kind, Mix, Vm


@dataclass(frozen=True)
class Scenario:
    """A whole scenario; its load is either `mix` or `vms`."""

    nodes: tuple[ClusterNode, ...]
    mix: Mix | None
    vms: tuple[Vm, ...]
    strategies: tuple[Strategy, ...]
    seeds: tuple[int, ...]
    moves: int = 0
    """How many running VMs may move for one that does not fit well."""

    @property
    def arrivals(self) -> int:
        """VMs that arrive in one simulation."""
        return len(self.vms) if self.mix is None else self.mix.requests

    @cached_property
    def memory_per_cpu(self) -> float:
        """Bytes outside huge pages that the VMs request for each vCPU, on average."""
        shares = (
            [(kind.share, kind.request) for kind in self.mix.kinds]
            if self.mix is not None
            else [(1.0, vm.request) for vm in self.vms]
        )
        cpus = sum(share * request.vcpus for share, request in shares)
        memory = sum(share * plain_bytes(one.memory, one.huge_pages) for share, one in shares)
        return memory / cpus


def load_scenario(path: Path) -> Scenario:
    """Read a scenario document, from stdin for `-`; raises BadBody that names the file and the key's path."""
    what = source_name(str(path))
    document = read_model(ScenarioDocument, load_document(path), what)
    try:
        return scenario_of(document, path.parent)
    except BadBody as error:
        raise BadBody(f"{what}: {error}") from None


def scenario_of(document: ScenarioDocument, folder: Path) -> Scenario:
    """Read the machines that a document in a folder names; raises BadBody."""
    mix = None
    if document.mix is not None:
        kinds = tuple(Kind(entry.share, entry.request) for entry in document.mix)
        mix = Mix(kinds, document.requests, document.load)
    return Scenario(
        nodes=nodes_of(document, folder),
        mix=mix,
        vms=_vms(document.vms or ()),
        strategies=tuple(dict.fromkeys(document.strategies)),
        seeds=tuple(dict.fromkeys(document.seeds)),
        moves=document.moves,
    )


def example_scenario() -> Scenario:
    """Read the scenario that comes with kvplace."""
    what = "the example scenario"
    return scenario_of(read_model(ScenarioDocument, read_document(EXAMPLE, what), what), Path())


def _vms(entries: tuple[VmEntry, ...]) -> tuple[Vm, ...]:
    found: dict[str, Vm] = {}
    for number, entry in enumerate(entries):
        for name in numbered(entry.id or f"vm-{len(found) + 1}", entry.count):
            if name in found:
                raise BadBody(f"vms[{number}].id: duplicate VM id {name!r}")
            found[name] = Vm(name, entry.request, entry.lifetime, entry.arrives)
        if len(found) > MOST_REQUESTS:
            raise BadBody(f"vms[{number}]: there are more than {MOST_REQUESTS} VMs")
    return tuple(found.values())
