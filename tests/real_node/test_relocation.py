"""Other cores for a running VM: its annotations are edited, and ledger, libvirt and kernel follow."""

from __future__ import annotations

from harness.control_plane.watching import condition, wait_for
from tests.real_node.vms import LEDGERS, Vm, Vms, ledger

SHARE = {"kvplace.io/cpu-policy": "share"}
EXCLUSIVE = {"kvplace.io/cpu-policy": "exclusive"}


def agrees(vm: Vm) -> None:
    """Whether kernel, libvirt's threads, cpu-map and placement state the same."""
    placement = vm.bound().placement
    threads = vm.threads()
    assert threads.vcpus() == {number: 1 << cpu for number, cpu in enumerate(placement.vcpus)}
    assert set(threads.emulator().values()) == {placement.emulator_cpus}
    assert vm.compute.cpus() & placement.cpus == placement.cpus
    assert [cpu for cpus in vm.cpu_map().values() for cpu in cpus] == [str(cpu) for cpu in placement.vcpus]


def test_an_exclusive_vm_shares_its_cpus_and_owns_one_again_without_being_restarted(vms: Vms) -> None:
    vm = vms.start("changes", node="n1")
    vm.pinned(1)
    agrees(vm)
    qemu = vm.compute.qemu()
    assert ledger(vms.cluster, "n1")["owners"] == {"1": vm.pod_uid}

    vm.ask(SHARE)
    vm.pinned(2)
    wait_for(vms.cluster.plane, LEDGERS, "n1", lambda seen: not seen["spec"]["owners"])
    agrees(vm)
    busy = vms.busy_pod("neighbour", "n1")
    assert busy.cpus() == 0b11

    vm.ask(EXCLUSIVE)
    vm.pinned(3)
    agrees(vm)
    assert ledger(vms.cluster, "n1")["owners"] == {"1": vm.pod_uid}
    assert busy.cpus() == 0b01
    assert vm.compute.qemu() == qemu


def test_an_edit_that_the_machine_cannot_satisfy_is_answered_and_changes_nothing(vms: Vms) -> None:
    vm = vms.start("modest", node="n1")
    vm.pinned(1)

    # One more CPU for QEMU's other threads: the node has none.
    vm.ask({"kvplace.io/emulator-threads": "isolate"})
    name = vm.pod()["metadata"]["name"]
    refused = wait_for(
        vms.cluster.plane, vms.pods, name, lambda pod: condition(pod, "kvplace.io/Relocated") == "False"
    )
    (answer,) = [
        entry for entry in refused["status"]["conditions"] if entry["type"] == "kvplace.io/Relocated"
    ]
    assert "CPU" in answer["message"]
    agrees(vm)
    assert vm.bound().revision == 1
    assert ledger(vms.cluster, "n1")["owners"] == {"1": vm.pod_uid}
