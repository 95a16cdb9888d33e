"""Cores beside devices: compared with every set of CPUs where their NUMA nodes are known, and by example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from kvplace.core.allocator.allocate import may_fit, place
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import NO_NUMA, DeviceCount, NodeDevices, TopologyPolicy
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.request import DeviceNuma, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import CpuMask, NumaId, ResourceName
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import Judge, levels_nest, sockets, unlike_sets
from tests.core.allocator.random_cases import random_case, scarce_memory_case
from tests.core.allocator.shapes import machine, slit
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB
from tests.profiles import rounds

VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/gpu")
DeviceKey = tuple[object, ...]
"""Sockets, NUMA nodes, NUMA nodes of devices without a CPU, and the other objectives in their order."""


def far_devices(on: Topology, request: Request, cpus: int) -> int:
    """How many NUMA nodes of devices, or their sockets, have no CPU of the VM."""
    near = []
    for node in request.device_nodes:
        here = on.node_by_id[node].cpus
        if request.options.device_numa is DeviceNuma.SOCKET:
            here = CpuMask(mask_of(c for one in sockets(on) if one.cpus & here for c in cpus_of(one.cpus)))
        near.append(here)
    return sum(1 for here in near if not here & cpus)


def best_beside(on: Topology, free: Free, request: Request) -> DeviceKey | None:
    """The best key of all sets of CPUs, with its devices; None where there is none."""
    judge = Judge(on, free, request)
    available = judge.usable(free.cpus if request.owns_cpus else free.pool)
    keys: list[DeviceKey] = []
    for cpus in unlike_sets(on, available, judge.need, judge.one_per_core):
        far = far_devices(on, request, cpus)
        if far == 0 or request.options.device_numa is DeviceNuma.PREFERRED:
            keys += [(*key[:2], far, *key[2:]) for key in judge.sittings(cpus)]
    return min(keys, default=None)


@pytest.mark.parametrize("mode", [DeviceNuma.PREFERRED, DeviceNuma.REQUIRED, DeviceNuma.SOCKET])
@pytest.mark.parametrize("question", [random_case, scarce_memory_case])
def test_no_answer_is_worse_than_the_best_of_all_sets_of_cpus_beside_devices(
    question: Callable[[int, int], tuple[Topology, Free, Request]], mode: DeviceNuma
) -> None:
    placed = refused = 0
    for number in range(rounds(1_000, quick=250)):
        on, free, request = question(number, 11)
        if not levels_nest(on) or request.options.policy is Policy.NUMA:
            continue
        chance = Random(number)
        nodes = [node.id for node in on.numa_nodes if node.cpus]
        request = replace(
            request,
            options=replace(request.options, device_numa=mode),
            device_nodes=frozenset(chance.sample(nodes, min(len(nodes), chance.choice((1, 1, 2, 3))))),
        )
        answer, best = place(on, free, request), best_beside(on, free, request)
        assert may_fit(on, free, request) == (best is not None), number
        if isinstance(answer, Placement):
            placed += 1
            key = key_of_valid(on, free, request, answer)
            far = far_devices(on, request, answer.cpus | answer.owned)
            assert (*key[:2], far, *key[2:]) == best, number
        else:
            refused += 1
            assert best is None, number
    assert placed > rounds(200, quick=40)
    assert refused > rounds(200, quick=30)


TWO_NODES = machine(
    packages=["0-7", "8-15"],
    nodes=["0-7", "8-15"],
    l3=["0-7", "8-15"],
    cores=[f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)],
    distances=slit([10, 21], [21, 10]),
    memory=[64, 64],
)


def devices(*counts: tuple[ResourceName, int, int, int], policy: str = "none") -> NodeDevices:
    """Devices by resource, NUMA node, total and free."""
    return NodeDevices.of(
        (DeviceCount(resource, NumaId(node), total, free) for resource, node, total, free in counts),
        TopologyPolicy(policy),
    )


def asked(
    mode: DeviceNuma, wanted: dict[ResourceName, int], vcpus: int = 4, scope: Scope = Scope.ONE_NUMA
) -> Request:
    return Request(vcpus, PinningOptions(scope=scope, device_numa=mode), devices=wanted)


def answer_on(found: NodeDevices | None, request: Request, only: str | None = None) -> Placement | Refusal:
    cpus = TWO_NODES.cpus if only is None else parse_cpu_list(only)
    return place(TWO_NODES, free_of(TWO_NODES, Ledger(), devices=found).within(cpus), request)


def nodes_of(answer: Placement | Refusal) -> tuple[int, ...]:
    assert isinstance(answer, Placement), answer
    return answer.numa_nodes


def message_of(answer: Placement | Refusal) -> str:
    assert isinstance(answer, Refusal), answer
    assert answer.reason is Reason.NO_LOCAL_DEVICES
    assert not answer.never
    return answer.message


@pytest.mark.parametrize("mode", [DeviceNuma.PREFERRED, DeviceNuma.REQUIRED, DeviceNuma.SOCKET])
def test_a_resource_on_one_numa_node_draws_the_vm_there(mode: DeviceNuma) -> None:
    assert nodes_of(answer_on(devices((VF, 1, 2, 1)), asked(mode, {VF: 1}))) == (1,)


def test_a_vm_whose_devices_do_not_matter_lies_where_it_would_lie_without_them() -> None:
    assert nodes_of(answer_on(devices((VF, 1, 2, 1)), asked(DeviceNuma.OFF, {VF: 1}))) == (0,)
    assert nodes_of(answer_on(devices((VF, 1, 2, 1)), asked(DeviceNuma.REQUIRED, {}))) == (0,)


def test_required_is_refused_with_the_numbers_where_no_cores_are_beside_the_only_device() -> None:
    answer = answer_on(devices((VF, 0, 2, 1)), asked(DeviceNuma.REQUIRED, {VF: 1}, 8), only="2-15")
    assert message_of(answer) == (
        "no 8 free CPUs on NUMA node 0, the only one with a free intel.com/vf; best 6"
    )
    assert isinstance(answer, Refusal)
    assert answer.shortfall == {"needed": 8, "best": 6, "missing": 2, "where": "NUMA node 0"}


def test_preferred_lies_elsewhere_before_it_is_refused_or_spread() -> None:
    found = devices((VF, 0, 2, 1))
    assert nodes_of(answer_on(found, asked(DeviceNuma.PREFERRED, {VF: 1}, 8), only="2-15")) == (1,)
    wide = asked(DeviceNuma.PREFERRED, {VF: 1}, 8, Scope.ANY)
    assert nodes_of(answer_on(found, wide, only="2-15")) == (1,)


def test_required_takes_more_numa_nodes_to_have_a_cpu_beside_each_device() -> None:
    found = devices((VF, 0, 2, 1), (GPU, 1, 1, 1))
    request = asked(DeviceNuma.REQUIRED, {VF: 1, GPU: 1}, 4, Scope.ANY)
    answer = answer_on(found, request)
    assert nodes_of(answer) == (0, 1)
    assert isinstance(answer, Placement)
    assert answer.cpus & 0xFF
    assert answer.cpus & 0xFF00
    assert nodes_of(
        answer_on(found, replace(request, options=replace(request.options, device_numa=DeviceNuma.PREFERRED)))
    ) == (0,)


def test_with_an_aligning_policy_the_lowest_node_with_enough_of_all_resources_counts() -> None:
    found = ((VF, 0, 4, 1), (VF, 1, 4, 4), (GPU, 0, 1, 1), (GPU, 1, 1, 1))
    request = asked(DeviceNuma.REQUIRED, {VF: 2, GPU: 1})
    assert nodes_of(answer_on(devices(*found, policy="best-effort"), request)) == (1,)
    fewer = asked(DeviceNuma.REQUIRED, {VF: 1, GPU: 1})
    assert nodes_of(answer_on(devices(*found, policy="best-effort"), fewer)) == (0,)


def test_where_the_kubelet_may_take_any_device_required_is_refused_with_the_fix() -> None:
    found = devices((VF, 0, 4, 1), (VF, 1, 4, 4))
    assert message_of(answer_on(found, asked(DeviceNuma.REQUIRED, {VF: 1}))) == (
        "the kubelet may take intel.com/vf from NUMA nodes 0, 1: set its topologyManagerPolicy to"
        " best-effort, or do not use device-numa: required"
    )


def test_where_the_kubelet_may_take_any_device_preferred_takes_the_node_with_most() -> None:
    found = devices((VF, 0, 4, 1), (VF, 1, 4, 4))
    assert nodes_of(answer_on(found, asked(DeviceNuma.PREFERRED, {VF: 2}))) == (1,)
    assert nodes_of(answer_on(found, asked(DeviceNuma.PREFERRED, {VF: 2}), only="0-7")) == (0,)


def test_a_device_without_a_numa_node_constrains_nothing() -> None:
    found = devices((VF, int(NO_NUMA), 4, 4))
    assert nodes_of(answer_on(found, asked(DeviceNuma.REQUIRED, {VF: 1}))) == (0,)


def test_without_a_report_required_is_refused_and_preferred_is_placed() -> None:
    assert message_of(answer_on(None, asked(DeviceNuma.REQUIRED, {VF: 1}))) == (
        "nothing reports the NUMA nodes of intel.com/vf: run the agent there, or do not use"
        " device-numa: required"
    )
    assert nodes_of(answer_on(None, asked(DeviceNuma.PREFERRED, {VF: 1}))) == (0,)


def test_a_node_without_the_device_is_refused_for_it() -> None:
    answer = answer_on(devices((GPU, 0, 1, 1)), asked(DeviceNuma.REQUIRED, {VF: 1}))
    assert message_of(answer) == "the node has no intel.com/vf"


def test_a_device_beside_no_cpu_of_the_machine_constrains_nothing() -> None:
    request = replace(asked(DeviceNuma.REQUIRED, {}), device_nodes=frozenset([NumaId(7)]))
    assert nodes_of(answer_on(None, request)) == (0,)


def test_a_socket_may_have_its_cores_on_another_numa_node_than_its_device() -> None:
    on = machine(
        packages=["0-7", "8-15"],
        nodes=["0-3", "4-7", "8-11", "12-15"],
        l3=["0-7", "8-15"],
        cores=[str(cpu) for cpu in range(16)],
        distances=slit([10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]),
    )
    free = free_of(on, Ledger(), devices=devices((VF, 3, 1, 1))).within(parse_cpu_list("0-11,12"))
    assert nodes_of(place(on, free, asked(DeviceNuma.SOCKET, {VF: 1}))) == (2,)
    assert message_of(place(on, free, asked(DeviceNuma.REQUIRED, {VF: 1}))) == (
        "no 4 free CPUs on NUMA node 3, the only one with a free intel.com/vf; best 1"
    )


def test_memory_on_another_numa_node_does_not_make_a_device_there_local() -> None:
    request = replace(
        asked(DeviceNuma.REQUIRED, {VF: 1}, 4, Scope.ANY),
        memory=80 * GIB,
        device_nodes=frozenset([NumaId(1)]),
    )
    answer = answer_on(devices((VF, 1, 1, 1)), request)
    assert isinstance(answer, Placement)
    assert answer.numa_nodes == (0, 1)
    assert answer.cpus & ~0xFF == answer.cpus


def test_whole_cores_are_found_beside_each_device() -> None:
    request = asked(DeviceNuma.REQUIRED, {VF: 1, GPU: 1}, 3, Scope.ANY)
    request = replace(request, options=replace(request.options, smt=Smt.ISOLATE))
    answer = answer_on(devices((VF, 0, 2, 1), (GPU, 1, 1, 1)), request)
    assert nodes_of(answer) == (0, 1)
