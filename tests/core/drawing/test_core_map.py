"""The core map shows every thread once, where it is, and whose it is."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.device_locality import LocatedDevice
from kvplace.core.drawing.core_map import Thread, ThreadState, draw
from kvplace.core.drawing.core_map_json import core_map_document
from kvplace.core.drawing.occupancy import label_of
from kvplace.core.drawing.svg_map import svg_map
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.node_devices import DeviceCount, PodDevice
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NumaId, PodUid, ResourceName
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from tests.core.example_ledgers import with_vm
from tests.core.machines import make_numa_node, make_package, make_topology

GIB = Bytes(1 << 30)


def _thread(topology: Topology, ledger: Ledger, cpu: int) -> Thread:
    return next(thread for thread in draw("node", topology, ledger).threads if thread.cpu == cpu)


@given(st.sampled_from(machine_names()), st.lists(st.sampled_from(list(Smt)), max_size=4))
def test_every_thread_of_a_machine_is_drawn_exactly_once(name: str, smts: list[Smt]) -> None:
    machine, ledger = read_machine(name), Ledger()
    for number, smt in enumerate(smts):
        ledger = with_vm(
            machine, ledger, f"vm-{number}", Request(4, PinningOptions(scope=Scope.ANY, smt=smt))
        )
    drawing = draw(name, machine, ledger)
    assert sorted(thread.cpu for thread in drawing.threads) == list(cpus_of(machine.cpus))
    owned = {
        thread.cpu for thread in drawing.threads if thread.state in (ThreadState.OWNED, ThreadState.IDLE)
    }
    assert mask_of(owned) == ledger.owned
    assert drawing.count(ThreadState.RESERVED) == machine.reserved.bit_count()


def test_boxes_nest_as_the_machine_does() -> None:
    drawing = draw("node", read_machine("2x-epyc-7763-nps4"))
    assert [package.id for package in drawing.packages] == [0, 1]
    assert [node.id for node in drawing.packages[1].nodes] == [4, 5, 6, 7]
    assert [l3.index for l3 in drawing.packages[1].nodes[0].l3_groups] == [8, 9]
    first_core = drawing.packages[1].nodes[0].l3_groups[0].cores[0]
    assert [thread.cpu for thread in first_core.threads] == [64, 192]


def test_an_l3_that_spans_numa_nodes_is_drawn_in_each_with_its_part() -> None:
    drawing = draw("node", read_machine("2x-xeon-8480plus-snc4"))
    nodes = drawing.packages[0].nodes
    assert [[l3.index for l3 in node.l3_groups] for node in nodes] == [[0]] * 4
    assert [len(node.l3_groups[0].cores) for node in nodes] == [14] * 4


def test_a_numa_node_that_spans_sockets_is_drawn_in_both_with_its_part() -> None:
    machine = make_topology(
        packages=(make_package(0, 0b0011), make_package(1, 0b1100)),
        numa_nodes=(make_numa_node(0, 0b1111, memory=GIB), make_numa_node(7, 0, memory=GIB)),
        l3_groups=(0b1111,),
        cores=(0b0101, 0b1010),
    )
    drawing = draw("odd", machine)
    assert [node.id for package in drawing.packages for node in package.nodes] == [0, 0]
    assert [thread.cpu for thread in drawing.threads] == [0, 1, 2, 3]
    assert [node.id for node in drawing.memory_only] == [7]


def test_letters_follow_the_machine_and_idle_siblings_have_a_state_of_their_own() -> None:
    machine = read_machine("epyc-7502p")
    ledger = with_vm(
        machine, Ledger(), "isolated", Request(2, PinningOptions(scope=Scope.ONE_L3, smt=Smt.ISOLATE))
    )
    ledger = with_vm(machine, ledger, "plain", Request(2, PinningOptions(scope=Scope.ONE_L3)))
    drawing = draw("node", machine, ledger)
    by_vm = {entry.claim.vmi: entry for entry in drawing.legend}
    first = min(by_vm.values(), key=lambda entry: min(cpus_of(entry.claim.owned)))
    assert first.label == "A"
    isolated = by_vm["isolated"]
    states = {thread.cpu: thread.state for thread in drawing.threads if isolated.label in thread.vms}
    assert sorted(state.value for state in states.values()) == ["idle", "idle", "owned", "owned"]


def test_shared_cpus_name_all_vms_that_share_them() -> None:
    machine = read_machine("epyc-7502p")
    request = Request(60, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE))
    one = with_vm(machine, Ledger(), "first", request)
    assert _thread(machine, one, 5) == Thread(CpuId(5), ThreadState.SHARED, ("A",))
    two = with_vm(machine, one, "second", request)
    assert _thread(machine, two, 5) == Thread(CpuId(5), ThreadState.SHARED, ("A", "B"))


def test_memory_and_huge_pages_of_a_vm_are_counted_once_each() -> None:
    machine = read_machine("2x-xeon-6338")
    request = Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=20 * GIB, huge_pages={GIB: 16})
    ledger = with_vm(machine, Ledger(), "paged", request)
    before, after = (draw("node", machine, book).packages[0].nodes[0] for book in (Ledger(), ledger))
    assert before.huge_pages == {GIB: (128, 128)}
    assert after.huge_pages == {GIB: (112, 128)}
    assert before.memory - before.free_memory == 128 * GIB
    assert before.free_memory - after.free_memory == 4 * GIB


def test_memory_that_is_set_aside_as_huge_pages_is_not_shown_as_used() -> None:
    machine = read_machine("2x-xeon-6338")
    request = Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=20 * GIB, huge_pages={GIB: 16})
    phrases = [
        draw("node", machine, ledger).packages[0].nodes[0].free_resources
        for ledger in (Ledger(), with_vm(machine, Ledger(), "paged", request))
    ]
    assert phrases == [
        ("124 of 124 GiB free", "128 GiB set aside: 128 of 128 huge pages of 1Gi free"),
        ("120 of 124 GiB free", "128 GiB set aside: 112 of 128 huge pages of 1Gi free"),
    ]


def test_qemus_own_threads_are_drawn_where_they_run_beside_the_vcpus_or_apart_from_them() -> None:
    """A thread that serves QEMU alone has a state of its own; one that the host lends it stays reserved."""
    machine = read_machine("epyc-7502p")
    ledger, placements = Ledger(), {}
    for name, threads in (("apart", EmulatorThreads.ISOLATE), ("lent", EmulatorThreads.SHARED)):
        options = PinningOptions(scope=Scope.ONE_L3, emulator_threads=threads)
        placed = place(machine, free_of(machine, ledger), Request(4, options, io_threads=2))
        assert isinstance(placed, Placement)
        placements[PodUid(name)] = placed
        ledger = ledger.after(LedgerChange(claims=(claim_of(PodUid(name), placed),)))
    drawing = draw("node", machine, ledger, placements=placements)
    apart, lent = (placements[PodUid(name)] for name in ("apart", "lent"))
    qemu = {thread.cpu: (thread.state, thread.qemu) for thread in drawing.threads if thread.qemu}
    assert qemu == {
        **dict.fromkeys(cpus_of(apart.emulator_cpus), (ThreadState.EMULATOR, ("B",))),
        **dict.fromkeys(cpus_of(machine.reserved), (ThreadState.RESERVED, ("A",))),
    }
    assert lent.emulator_cpus == machine.reserved
    host = format_cpu_list(machine.reserved)
    assert [entry.qemu_threads for entry in drawing.legend] == [
        f"emulator, I/O {host}",
        f"emulator, I/O {format_cpu_list(apart.emulator_cpus)}",
    ]
    legend = core_map_document(drawing)["legend"]
    assert (legend[0]["emulatorCpus"], legend[0]["ioThreadCpus"]) == (host, [host, host])
    unknown = draw("node", machine, ledger)
    assert [thread.state for thread in unknown.threads if thread.qemu] == []
    assert unknown.count(ThreadState.OWNED) == drawing.count(ThreadState.OWNED) + 1
    assert "emulatorCpus" not in core_map_document(unknown)["legend"][0]


def test_the_drawing_is_json_with_the_legend() -> None:
    machine = read_machine("altra-max-m128-30")
    ledger = with_vm(machine, Ledger(), "db", Request(4))
    document = json.loads(json.dumps(core_map_document(draw("altra", machine, ledger))))
    assert document["sockets"][0]["numaNodes"][0]["l3Groups"][0]["cores"][2] == [
        {"cpu": 2, "state": "owned", "vms": ["A"]}
    ]
    assert document["legend"] == [
        {
            "label": "A",
            "namespace": "default",
            "pod": "virt-launcher-db",
            "vmi": "db",
            "policy": "exclusive",
            "cpus": "2-5",
            "owned": "2-5",
        }
    ]


@given(st.integers(0, 5000))
def test_every_vm_has_letters_of_its_own(index: int) -> None:
    assert label_of(index) != label_of(index + 1)
    assert (label_of(0), label_of(25), label_of(26), label_of(701), label_of(702)) == (
        "A",
        "Z",
        "AA",
        "ZZ",
        "AAA",
    )
    assert label_of(index).isalpha()


def test_free_memory_is_written_in_fitting_units() -> None:
    machine = make_topology(
        packages=(make_package(0, 1),),
        numa_nodes=(
            make_numa_node(0, 1, memory=3 * GIB, huge_pages={Bytes(2 << 20): 512}),
            make_numa_node(1, 0, memory=300 << 20),
            make_numa_node(2, 0, memory=0),
        ),
        l3_groups=(1,),
        cores=(1,),
    )
    drawing = draw("odd", machine)
    assert drawing.packages[0].nodes[0].free_resources == (
        "2 of 2 GiB free",
        "1 GiB set aside: 512 of 512 huge pages of 2Mi free",
    )
    assert [node.free_resources for node in drawing.memory_only] == [
        ("300 of 300 MiB free",),
        ("memory unknown",),
    ]


def test_isolated_and_foreign_cpus_have_states_of_their_own() -> None:
    machine = replace(read_machine("epyc-7502p"), reserved=CpuMask(0b1), isolated=CpuMask(0b11110))
    ledger = with_vm(machine, Ledger(), "db", Request(2))
    drawing = draw("node", machine, ledger, foreign=CpuMask(0b11 << 40 | 0b10))
    states = {thread.cpu: thread.state for thread in drawing.threads}
    assert states[CpuId(0)] is ThreadState.RESERVED
    assert {cpu for cpu, state in states.items() if state is ThreadState.FOREIGN} == {40, 41} | (
        {1} - set(cpus_of(ledger.owned))
    )
    isolated = {cpu for cpu, state in states.items() if state is ThreadState.ISOLATED}
    assert isolated == {1, 2, 3, 4} - set(cpus_of(ledger.owned | 0b10))
    assert drawing.summary.startswith("64 CPUs, ")


def test_a_numa_node_has_its_devices_and_a_vm_where_its_own_are() -> None:
    machine = read_machine("2x-epyc-9354-nps2")
    ledger = with_vm(machine, Ledger(), "vnf", Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    (uid,) = ledger.claims
    vf = ResourceName("intel.com/vf")
    counts = (DeviceCount(vf, NumaId(1), 8, 7),)
    devices = {uid: (LocatedDevice(PodDevice(vf, NumaId(1)), is_local=False),)}
    drawing = draw("node", machine, ledger, counts=counts, devices=devices)
    boxes = {node.id: node for package in drawing.packages for node in package.nodes}
    assert boxes[NumaId(1)].free_resources[-1] == "7 of 8 intel.com/vf free"
    assert boxes[NumaId(0)].devices == {}
    (entry,) = drawing.legend
    assert entry.beside_cpus.endswith("1 intel.com/vf on NUMA 1 (not local)")
    document = core_map_document(drawing)
    nodes = [node for socket in document["sockets"] for node in socket["numaNodes"]]
    assert [node.get("devices") for node in nodes] == [
        None, {"intel.com/vf": {"free": 7, "count": 8}}, None, None
    ]  # fmt: skip
    assert document["legend"][0]["devices"] == ["1 intel.com/vf on NUMA 1 (not local)"]
    assert "1 intel.com/vf on NUMA 1 (not local)" in svg_map(drawing)
