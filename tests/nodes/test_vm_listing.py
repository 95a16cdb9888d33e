"""The list of VMs combines their pods with what KubeVirt reports of them, and has those without a pod."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvplace.cli.view_tables import vm_columns
from kvplace.core.label_terms import read_label_terms
from kvplace.core.ledger import Ledger, Reserved
from kvplace.core.node_devices import DeviceReport, NodeDevices, PodDevice
from kvplace.core.request import PinningOptions, Policy, Scope
from kvplace.core.scalars import CpuId, CpuMask, NodeName, NumaId, PodUid, ResourceName
from kvplace.core.well_known_names import PINNED
from kvplace.kube.api_errors import Denied, NotFound
from kvplace.kube.object_records import NO_NODE, Condition, LedgerRecord, PodRecord
from kvplace.kube.reported_vms import VM_READERS, VMI_PHASES, VMS, ReportedVm
from kvplace.kube.watches import EVERYTHING, LEDGERS, PLACED_PODS, TOPOLOGIES, Interrupted, Kind, Selector
from kvplace.nodes.cluster_reading import listed_vms, read_listed_vms, watch_listed_vms
from kvplace.nodes.cluster_view import VmState, VmView
from kvplace.nodes.view_output import vm_view_document
from tests.core.example_ledgers import claim
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

ASKS = PinningOptions(scope=Scope.ONE_NUMA)
POD = PodRecord("shop", "virt-launcher-db", PodUid("1"), NodeName("a"), phase="Running", vmi="db")
VM = ReportedVm("shop", "db", status="Running", options=ASKS)
VMI = replace(VM, is_instance=True)
REQUEST = '{"version":1,"vcpus":2}'


def _listed(*found: PodRecord | ReportedVm, selector: Selector = EVERYTHING) -> list[tuple[str, str, str]]:
    pods = [one for one in found if isinstance(one, PodRecord)]
    statuses = [one for one in found if isinstance(one, ReportedVm)]
    vms = listed_vms(pods, statuses, selector)
    return [(vm.name, vm.state.value, vm.phase) for vm in vms]


def test_a_vm_whose_pod_runs_is_starting_until_kubevirt_states_that_its_guest_does() -> None:
    for phase in ("Pending", "Scheduling", "Scheduled"):
        assert _listed(POD, VM, replace(VMI, status=phase)) == [("db", "Starting", phase)]
    assert _listed(POD, VM, VMI) == [("db", "Running", "Running")]
    assert _listed(POD) == [("db", "Running", "")]


def test_a_measurement_of_the_agent_counts_more_than_a_late_phase() -> None:
    measured = replace(POD, conditions=(Condition(PINNED, True, "Read", "every thread is in its place"),))
    assert _listed(measured, replace(VMI, status="Scheduled")) == [("db", "Pinned", "Scheduled")]


def test_a_vm_without_a_pod_is_there_in_the_word_of_the_vm_and_not_of_its_instance() -> None:
    missing = replace(VM, status="ErrorPvcNotFound")
    assert _listed(missing, replace(VMI, status="Pending")) == [("db", "NotCreated", "ErrorPvcNotFound")]
    assert _listed(replace(VMI, status="Pending")) == [("db", "NotCreated", "Pending")]
    assert _listed(replace(VM, status="Stopped", options=None)) == []


def test_a_vm_that_was_stopped_is_there_beside_its_pod_that_has_ended() -> None:
    ended = replace(POD, phase="Succeeded")
    assert _listed(ended, replace(VM, status="Stopped")) == [
        ("db", "NotCreated", "Stopped"),
        ("db", "Ended", ""),
    ]


def test_labels_select_vms_without_a_pod_by_the_labels_of_their_future_pods() -> None:
    web, db = (replace(VM, name=name, status="Stopped", labels={"app": name}) for name in ("web", "db"))
    chosen = Selector(label_terms=read_label_terms("app=web"))
    assert _listed(web, db, selector=chosen) == [("web", "NotCreated", "Stopped")]


def test_a_reservation_of_a_waiting_vm_is_listed_with_the_cpus_that_others_still_use() -> None:
    waiting = replace(POD, node=NO_NODE, phase="Pending")
    node = NodeName("worker")
    reserved = Reserved(CpuMask(0b1100), "2026-01-02T03:05:00Z")
    claimed = replace(claim("db", 0b1100, 0b0100), uid=waiting.uid, reserved=reserved)
    ledger = LedgerRecord(node, Ledger({CpuId(2): waiting.uid}, {waiting.uid: claimed}), "1")
    (vm,) = listed_vms([waiting], [], EVERYTHING, [ledger])
    assert (vm.state, vm.reserved_on) == (VmState.WAITING, node)
    assert _row(vm)["RESERVED"] == "worker: 2-3, 3 still used"
    assert vm_view_document(vm)["reserved"] == {
        "node": "worker", "owned": "2-3", "stillInUse": "3", "until": "2026-01-02T03:05:00Z"
    }  # fmt: skip
    (bound,) = listed_vms([POD], [], EVERYTHING, [ledger])
    assert (bound.reserved_on, "reserved" in vm_view_document(bound)) == ("", False)


class _WithoutKinds(FaultyCluster):
    """An API server without KubeVirt that does not let us list some kinds."""

    def __init__(self, refused: set[Kind[Any, Any]]) -> None:
        super().__init__()
        self.refused = refused

    async def read_all(self, kind: Any, selector: Any = EVERYTHING) -> tuple[Any, ...]:
        if kind in self.refused:
            raise Denied("list", kind.name, "cannot list")
        if kind in VM_READERS:
            raise NotFound(f"{kind.name} are not served")
        return await super().read_all(kind, selector)


async def test_a_missing_right_to_see_reservations_is_reported_while_a_vm_waits() -> None:
    cluster = _WithoutKinds({LEDGERS})
    assert (await read_listed_vms(cluster, PLACED_PODS)).notes == ()
    cluster.create_pod("late", namespace="shop", uid="late", request=REQUEST)
    listed = await read_listed_vms(cluster, PLACED_PODS)
    assert [vm.name for vm in listed.vms] == ["late"]
    (note,) = listed.notes
    assert note.startswith("you may not list nodeledgers: reservations for waiting VMs are left out")
    await cluster.close()


def _row(vm: VmView) -> dict[str, str]:
    columns = vm_columns(lambda: datetime.now(UTC), with_namespace=False)
    return {column.head: column.cell(vm) for column in columns}


async def test_devices_of_vms_are_read_where_vms_request_some() -> None:
    vf = ResourceName("intel.com/vf")
    cluster = _WithoutKinds({TOPOLOGIES})
    cluster.create_pod("plain", namespace="shop", uid="plain", request=REQUEST, node="worker")
    assert (await read_listed_vms(cluster, PLACED_PODS)).notes == ()
    wants = '{"version":1,"vcpus":2,"devices":{"intel.com/vf":1}}'
    cluster.create_pod("vnf", namespace="shop", uid="vnf", request=wants, node="worker")
    listed = await read_listed_vms(cluster, PLACED_PODS)
    (note,) = listed.notes
    assert note.startswith("you may not list nodetopologies: devices of VMs are left out")
    assert {vm.name: _row(vm)["DEVICES"] for vm in listed.vms} == {
        "plain": "-",
        "vnf": "1 intel.com/vf (not reported)",
    }
    cluster.refused.clear()
    report = DeviceReport(NodeDevices(), {PodUid("vnf"): (PodDevice(vf, NumaId(1), "0000:c1:00.2"),)})
    cluster.put_topology("worker", TWO, devices=report)
    listed = await read_listed_vms(cluster, PLACED_PODS)
    assert listed.notes == ()
    vnf = next(vm for vm in listed.vms if vm.name == "vnf")
    assert _row(vnf)["DEVICES"] == "1 intel.com/vf on NUMA 1"
    assert vm_view_document(vnf)["devices"] == [
        {"resource": "intel.com/vf", "numaNode": 1, "address": "0000:c1:00.2", "local": None}
    ]
    await cluster.close()


class _WithoutKubeVirt(FaultyCluster):
    """An API server that does not serve KubeVirt's kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = set[Any]()
        """The kinds that are no longer asked for."""

    async def watch(self, kind: Any, selector: Any = EVERYTHING) -> AsyncIterator[Any]:
        if kind in VM_READERS:
            try:
                yield Interrupted(NotFound(f"{kind.name} are not served"))
                await asyncio.Event().wait()
            finally:
                self.ended.add(kind)
        async for event in super().watch(kind, selector):
            yield event


async def test_without_kubevirt_pods_are_watched_alone_and_one_that_is_gone_is_reported_as_it_was_last() -> (
    None
):
    cluster = _WithoutKubeVirt()
    cluster.create_pod("late", namespace="shop", uid="late", request=REQUEST)
    async with contextlib.aclosing(watch_listed_vms(cluster, PLACED_PODS)) as watched:
        first = await anext(watched)
        assert (first.is_first, first.notes, [vm.name for vm in first.vms]) == (True, (), ["late"])
        cluster.create_pod("new", namespace="shop", uid="new", request=REQUEST)
        changed = await anext(watched)
        assert (changed.is_first, [vm.name for vm in changed.vms]) == (False, ["new"])
        cluster.delete_pod("shop", "late", force=True)
        assert [vm.name for vm in (await anext(watched)).vms] == ["late"]
        assert cluster.ended == set(VM_READERS)
    await cluster.close()


def _read(kind: Any, document: dict[str, Any]) -> ReportedVm:
    found: ReportedVm = VM_READERS[kind].record(msgspec.Raw(msgspec.json.encode(document)))
    return found


def test_a_vm_asks_in_its_template_and_an_instance_on_itself() -> None:
    asking = {"annotations": {"cpu-set": "one-l3", "kvplace.io/cpu-policy": "share"}, "labels": {"app": "db"}}
    meta = {"name": "db", "namespace": "shop", "creationTimestamp": "2026-01-02T03:04:05Z"}
    vm = _read(
        VMS,
        {
            "metadata": meta,
            "spec": {"template": {"metadata": asking}},
            "status": {"printableStatus": "Stopped"},
        },
    )
    options = PinningOptions(scope=Scope.ONE_L3, policy=Policy.SHARE)
    assert vm == ReportedVm(
        "shop", "db", "", "2026-01-02T03:04:05Z", "Stopped", options=options, labels={"app": "db"}
    )
    vmi = _read(VMI_PHASES, {"metadata": {**meta, **asking}, "status": {"phase": "Scheduled"}})
    assert (vmi.status, vmi.is_instance, vmi.options) == ("Scheduled", True, options)
    plain = _read(VMS, {"metadata": {**meta, **asking}})
    assert (plain.status, plain.options) == ("", None)
    wrong = _read(VMI_PHASES, {"metadata": {**meta, "annotations": {"cpu-set": "one-soket"}}})
    assert wrong.options is None
    assert listed_vms((), (plain, wrong), EVERYTHING) == ()
    assert [one.state for one in listed_vms((), (vm,), EVERYTHING)] == [VmState.NOT_CREATED]
