"""The probable nodes of the VMs of a rollout, and the VMs that will not fit.

The planning code of `kvplace plan` runs on the CPUs that are free now, on the nodes where cordons, taints,
selectors and required node affinity let the VMs of each template go. It is a forecast: the scheduler decides
one VM after the other, other pods may be faster, and volumes and affinity to pods are not considered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.planning import VmRequest, plan
from kvplace.core.quantity import counted, first_of
from kvplace.core.scalars import NodeName
from kvplace.nodes.planning_cluster import PlanningCluster
from kvplace.plan.plan_documents import RefusedVms, refused_vms
from kvplace.rollout.templates import WantedVm

_SIZELESS = "without a request for cores of known size"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer for every VM."""

    nodes: Mapping[str, NodeName]
    """The node of each VM that fits."""
    refused: tuple[RefusedVms, ...]
    """VMs that fit nowhere, grouped by equal requests."""
    unplanned: tuple[str, ...]
    """VMs that did not opt in, or with a size that is not known yet."""
    notes: tuple[str, ...] = ()
    """Sentences about the start of the forecast."""
    why_unplanned: str = _SIZELESS

    @property
    def by_node(self) -> Mapping[NodeName, int]:
        """How many VMs go to each node, in the order of the nodes' names."""
        found = Counter(self.nodes.values())
        return {node: found[node] for node in sorted(found)}

    @property
    def left_out(self) -> Mapping[str, str]:
        """The VMs that do not fit, with the reason."""
        return {
            name: f"does not fit: {group.reasons.summary}" for group in self.refused for name in group.ids
        }

    @property
    def summary(self) -> tuple[str, ...]:
        """Sentences for a person who is asked to confirm."""
        lines = list(self.notes)
        if self.nodes:
            nodes = counted(len(self.by_node), "node")
            lines.append(f"{counted(len(self.nodes), 'VM')} will get cores on {nodes}, as of now")
        if self.unplanned:
            lines.append(f"{counted(len(self.unplanned), 'VM')} not planned: {self.why_unplanned}")
        lines += [f"{first_of(group.ids, 1)} will not fit: {group.reasons.summary}" for group in self.refused]
        return tuple(lines)


def forecast(
    cluster: PlanningCluster, vms: Iterable[WantedVm], strategy: Strategy = Strategy.PACK
) -> Forecast:
    """Plan the VMs that opted in, beside the VMs that run on the nodes."""
    wanted = list(vms)
    templates = {id(vm.template): vm.template for vm in wanted}
    closed = {key: cluster.closed_to(template.demands) for key, template in templates.items()}
    requests = [
        VmRequest(vm.name, vm.template.request, closed[id(vm.template)])
        for vm in wanted
        if vm.template.request is not None
    ]
    found = plan(cluster.nodes, cluster.counting(requests), strategy)
    return Forecast(
        {vm.id: vm.node for vm in found.planned},
        tuple(refused_vms(found)),
        tuple(vm.name for vm in wanted if vm.template.request is None),
        (*_doubts(wanted), *cluster.notes),
    )


def unplanned(vms: Iterable[WantedVm], *, by_choice: bool) -> Forecast:
    """Make a forecast without a plan: the user did not want one, or no VM can be planned."""
    why = "planning was left out" if by_choice else _SIZELESS
    wanted = list(vms)
    return Forecast({}, (), tuple(vm.name for vm in wanted), _doubts(wanted), why)


def _doubts(vms: Iterable[WantedVm]) -> tuple[str, ...]:
    """Name the annotations of templates without effect, and the keys that they are likely typos of."""
    return tuple(
        dict.fromkeys(
            f"annotation {key} of the template of {vm.name} has no effect: did you mean {meant}?"
            for vm in {id(vm.template): vm for vm in reversed(list(vms))}.values()
            for key, meant in vm.template.meant.items()
        )
    )
