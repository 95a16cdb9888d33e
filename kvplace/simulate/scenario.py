"""What `kvplace simulate` plays: a cluster, what is ordered on it, and how the nodes are chosen.

nodes: [...]             # as in a cluster document
mix:                     # drawn by share; or `vms`, one by one
- share: 5
  request: {vcpus: 2, memory: 8Gi}
requests: 2000
load: 0.9
strategies: [pack, balance]
seeds: [1, 2, 3]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import BadBody
from kvplace.core.moves.make_room import MOST_MOVES
from kvplace.core.request import Request
from kvplace.documents.reading import Part, load_document, read_document
from kvplace.machines.cluster import cluster_of
from kvplace.simulate.traffic import Kind, Mix, Vm

_MOST_REQUESTS = 1_000_000
_MOST_SEEDS = 100
_MOST_SEED = 1 << 63
_MOST_KINDS = 1000
_KEYS = ("nodes", "mix", "requests", "load", "vms", "strategies", "seeds", "moves")


@dataclass(frozen=True)
class Scenario:
    """A whole scenario; either `mix` or `vms` says what is ordered."""

    nodes: tuple[ClusterNode, ...]
    mix: Mix | None
    vms: tuple[Vm, ...]
    strategies: tuple[Strategy, ...]
    seeds: tuple[int, ...]
    moves: int = 0
    """How many running VMs may move for one that does not fit well."""

    @cached_property
    def memory_per_cpu(self) -> float:
        """Bytes outside huge pages that the VMs together ask for, for each vCPU."""
        orders = (
            [(kind.share, kind.request) for kind in self.mix.kinds]
            if self.mix is not None
            else [(1.0, vm.request) for vm in self.vms]
        )
        cpus = sum(share * request.vcpus for share, request in orders)
        return sum(share * _plain_memory(request) for share, request in orders) / cpus


def _plain_memory(request: Request) -> int:
    return max(0, request.memory - sum(size * count for size, count in request.huge_pages.items()))


def load_scenario(path: Path) -> Scenario:
    """Read a scenario document; raises BadBody that names the file and the path of the key."""
    document = load_document(path)
    try:
        return scenario_of(document, path.parent)
    except BadBody as error:
        raise BadBody(f"{path}: {error}") from None


def scenario_of(document: Part, folder: Path) -> Scenario:
    """Read a scenario from a document that lies in a folder."""
    document.only(*_KEYS)
    nodes = cluster_of(document, folder)
    if ("mix" in document.keys) == ("vms" in document.keys):
        raise BadBody("say what is ordered by either mix (drawn by share) or vms (one by one)")
    return Scenario(
        nodes=nodes,
        mix=_mix(document) if "mix" in document.keys else None,
        vms=_vms(document) if "vms" in document.keys else (),
        strategies=_strategies(document),
        seeds=_seeds(document),
        moves=document.count("moves", 0, MOST_MOVES, 0),
    )


def example_text() -> str:
    """Give the scenario that comes with kvplace, for people to read, run and change."""
    return (files("kvplace.simulate") / "scenario.yaml").read_text(encoding="utf-8")


def example_scenario() -> Scenario:
    """Read the scenario that comes with kvplace."""
    return scenario_of(read_document(example_text(), "scenario.yaml"), Path())


def _mix(document: Part) -> Mix:
    kinds = []
    for part in document.parts("mix", _MOST_KINDS):
        part.only("share", "request")
        share = part.number("share", 0, 1e9, 1.0)
        kinds.append(Kind(share, part.part("request").request()))
    if not any(kind.share for kind in kinds):
        raise BadBody("mix has no entry with a share above 0; list what is ordered")
    return Mix(
        kinds=tuple(kinds),
        requests=document.count("requests", 1, _MOST_REQUESTS, 1000),
        load=document.number("load", 0.01, 1.0, 1.0) if "load" in document.keys else None,
    )


def _vms(document: Part) -> tuple[Vm, ...]:
    for key in ("requests", "load", "seeds"):
        if key in document.keys:
            raise BadBody(f"{key} belongs to mix; leave it out, or say what is ordered by mix")
    found: dict[str, Vm] = {}
    for part in document.parts("vms", _MOST_REQUESTS):
        part.only("id", "request", "arrives", "lifetime", "count")
        name = part.text("id", f"vm-{len(found) + 1}")
        request = part.part("request").request()
        arrives = part.number("arrives", 0, 1e15, 0.0)
        lifetime = part.number("lifetime", 1e-9, 1e15, 1.0) if "lifetime" in part.keys else None
        count = part.count("count", 1, _MOST_REQUESTS, 1)
        for one in [name] if "count" not in part.keys else [f"{name}-{n}" for n in range(1, count + 1)]:
            if not one or one in found:
                raise BadBody(f"{part.path('id')}: every VM needs an id of its own, {one!r} is there already")
            found[one] = Vm(one, request, lifetime, arrives)
        if len(found) > _MOST_REQUESTS:
            raise BadBody(f"{part.where}: there are more than {_MOST_REQUESTS} VMs")
    if not found:
        raise BadBody("vms is empty; list what is ordered")
    return tuple(found.values())


def _strategies(document: Part) -> tuple[Strategy, ...]:
    words = [strategy.value for strategy in Strategy]
    given = document.keys.get("strategies", [Strategy.PACK.value])
    if not isinstance(given, list) or not given or not all(word in words for word in given):
        raise document.bad("strategies", f"it must be a list of {', '.join(words)}")
    return tuple(dict.fromkeys(map(Strategy, given)))


def _seeds(document: Part) -> tuple[int, ...]:
    given = document.keys.get("seeds", [1])
    if (
        not isinstance(given, list)
        or not 0 < len(given) <= _MOST_SEEDS
        or not all(type(seed) is int and abs(seed) <= _MOST_SEED for seed in given)
    ):
        raise document.bad("seeds", f"it must be a list of 1 to {_MOST_SEEDS} whole numbers")
    return tuple(dict.fromkeys(given))
