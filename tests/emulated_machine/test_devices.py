"""Devices on a machine with two NUMA nodes: found there, compared with the cores, and opened by QEMU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.machine import EmulatedMachine
from harness.emulated_machine.shape import WITH_DEVICES
from harness.pod_cgroups import Driver, container_id
from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import read_options
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import DeviceNuma, OnFailure, Request
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from tests.domainxml.host_devices import pci
from tests.emulated_machine import devices_inside as devices
from tests.emulated_machine import node_inside as inside
from tests.emulated_machine import vm_keeper
from tests.emulated_machine.observation import observe
from tests.kubevirt_documents import DOMAINS

pytestmark = pytest.mark.timeout(600)

MEGABYTES = 64
FIRST, SECOND = "0000:41:00.0", "0000:c1:00.0"
NAME = "default_09-amd64-iothreads-shared"
UID = PodUid("5d1f7e0c-9a55-4f5e-8f0e-0b4d6a9b1c11")
ASKED = {
    "cpu-set": "one-numa",
    "kvplace.io/guest-numa": "mirror",
    "kvplace.io/emulator-threads": "with-vcpus",
    "kvplace.io/device-numa": "required",
}


def document_with(*addresses: str) -> bytes:
    """Put devices into a domain that KubeVirt's converter made."""
    written = "".join(pci(address, f"ua-hostdevice-d{n}") for n, address in enumerate(addresses))
    document = (DOMAINS / "09-amd64-iothreads-shared.domain.xml").read_bytes()
    return document.replace(b"</devices>", written.encode() + b"</devices>")


def placed_on(machine: EmulatedMachine, node: int, mode: DeviceNuma = DeviceNuma.REQUIRED) -> PodPlacement:
    """Place a VM of four vCPUs on one NUMA node."""
    topology = machine.call(observe).topology
    free = free_of(topology, Ledger())
    free = replace(free, cpus=CpuMask(topology.node_by_id[node].cpus))  # type: ignore[index]
    options = read_options(ASKED)
    assert options is not None
    chosen = place(topology, free, Request(4, options, memory=Bytes(MEGABYTES << 20)))
    assert isinstance(chosen, Placement), chosen
    return PodPlacement(UID, NodeName("emulated"), "", OnFailure.WAIT, chosen, device_numa=mode)


@on_machines(WITH_DEVICES)
def test_the_numa_node_of_every_device_equals_the_view_of_hwloc_there(machine: EmulatedMachine) -> None:
    roots = {0: FIRST, 1: SECOND}
    functions = {node: machine.call(devices.virtual_functions, root, 2) for node, root in roots.items()}
    seen = machine.call(devices.device_nodes)
    for node, made in functions.items():
        assert len(made) == 2
        assert [seen.ours[each] for each in made] == [node, node]  # type: ignore[index]
    assert seen.ours.keys() >= seen.hwloc.keys() >= {*functions[0], *functions[1]}
    assert {each: seen.ours[each] for each in seen.hwloc} == seen.hwloc
    assert None in seen.ours.values()


@on_machines(WITH_DEVICES)
def test_the_hook_refuses_a_device_on_the_other_numa_node_and_reports_it(machine: EmulatedMachine) -> None:
    remote = machine.call(devices.virtual_functions, SECOND, 2)[0]
    document = document_with(remote)
    answer, why = machine.call(devices.answer_of_hook, document, placed_on(machine, 0).to_json())
    assert answer == ""
    assert why.startswith(
        f"device ua-hostdevice-d0 ({remote}) is on NUMA node 1, not beside its cores: the VM's cores are on "
        "NUMA node 0; the VM waits for other cores because its kvplace.io/device-numa is required"
    )
    for mode in (DeviceNuma.PREFERRED, DeviceNuma.OFF):
        answer, why = machine.call(devices.answer_of_hook, document, placed_on(machine, 0, mode).to_json())
        assert why == ""
        assert "pcie-expander-bus" not in answer  # the guest has no cell of that node


@on_machines(WITH_DEVICES)
def test_a_vm_beside_its_devices_starts_and_qemu_opens_them(machine: EmulatedMachine) -> None:
    made = machine.call(devices.virtual_functions, SECOND, 2)
    bound = placed_on(machine, 1)
    cpus = parse_cpu_list("0-7")
    compute, sidecar = (
        machine.call(inside.make_container, UID, container_id(number), Driver.CGROUPFS.value, busy=False)
        for number in (1, 2)
    )
    machine.call(inside.write_cpuset, compute, format_cpu_list(CpuMask(cpus)))
    machine.call(inside.write_cpuset, sidecar, format_cpu_list(CpuMask(cpus)))
    vm = vm_keeper.Vm(compute, sidecar, "/run/with-devices.xml", MEGABYTES, "{}", bound.to_json())
    running = machine.call_within(200, devices.start_vm, vm, document_with(*made))
    try:
        opened, locked = machine.call(devices.open_devices, running.pid)
        assert set(opened) >= {machine.call(devices.group_of, each) for each in made}
        assert locked > (MEGABYTES - 1) << 10  # all of the guest's memory but the window of its VGA card
        xml = machine.output_of("virsh", "-c", running.uri, "dumpxml", "--domain", NAME)
        root = etree.fromstring(xml)
        (bus,) = root.findall("devices/controller[@model='pcie-expander-bus']")
        assert bus.findtext("target/node") == "0"
        ports = root.findall(f"devices/controller/address[@bus='0x{int(bus.get('index', '')):02x}']")
        assert len(ports) == len(made)
    finally:
        machine.call(inside.end_pods, [running.keeper])
