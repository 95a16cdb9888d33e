"""The facts that are read about a VM with a pod on a node: its place, and the obstacles to its start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplace.cli.explain_lines import seat_lines
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Refused
from kvplace.core.node_devices import NO_NUMA, DeviceReport, NodeDevices, PodDevice
from kvplace.core.node_topology import Enforcement
from kvplace.core.occupant import Nearness
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import CpuId, NodeName, NumaId, PackageId, PodUid, ResourceName
from kvplace.core.well_known_names import PINNED, PLACEMENT
from kvplace.explain.explanation import Explanation
from kvplace.explain.report import explanation_document
from kvplace.kube.object_records import Condition, ResourceClaimRecord, SliceDevice, SliceRecord
from tests.admission.reviewed_objects import vmi
from tests.core.requests import request_with
from tests.explain.small_cluster import WORKER, Objects, event, explained, node, pod_document
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO


async def test_a_running_vm_states_where_it_sits_whether_that_is_measured_and_who_is_beside_it(
    objects: Objects, cluster: FaultyCluster
) -> None:
    cpus = parse_cpu_list("0-1,8-9")
    placement = Placement(
        Policy.EXCLUSIVE,
        tuple(map(CpuId, (0, 8, 1, 9))),
        cpus,
        cpus,
        numa_nodes=(NumaId(0),),
        packages=(PackageId(0),),
        l3_groups=(0,),
    )
    bound = PodPlacement(PodUid("db"), WORKER, TWO.fingerprint, OnFailure.WAIT, placement, revision=2)
    pod = cluster.create_pod(
        "launcher",
        uid="db",
        vmi="db",
        node="worker",
        request=write_request(PodRequest(request_with(4))),
        annotations={PLACEMENT: bound.to_json()},
    )
    await cluster.set_pod_condition(pod, Condition(PINNED, True, "Pinned", "revision 2 was seen"))
    await cluster.write_ledger(
        await cluster.create_ledger(WORKER), taking(claim("db", 0, 1, 8, 9), claim("web", 2, 10))
    )
    since = {"type": PINNED, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    objects.put("pods", pod_document("launcher", "db", conditions=[since]))
    objects.put("virtualmachineinstances", vmi())
    objects.events = [
        event("Pod", "launcher", "2026-01-01T00:00:02Z", "second"),
        event("VirtualMachineInstance", "db", "2026-01-01T00:00:01.999999Z", "first", count=3),
    ]
    found = await explained(objects, cluster, "vm/db")
    (seat,) = found.seats
    assert (seat.vm.node, seat.measured_since) == ("worker", "2026-01-01T00:00:00Z")
    assert [(one.claim.uid, one.nearness) for one in seat.neighbours] == [("web", Nearness.L3)]
    assert found.fitting is None
    assert [(one.note, one.count) for one in found.events] == [("first", 3), ("second", 1)]
    (document,) = explanation_document(found)["pods"]
    assert document["placement"]["revision"] == 2
    assert document["pinned"]["status"] is True
    assert document["sameMachine"] is True


async def bound(
    objects: Objects, cluster: FaultyCluster, *owned: int, node: str = "worker", **status: Any
) -> None:
    """Bind `db` to CPUs 0-1 and 8-9 of a node, with these of them as its own in the ledger."""
    cpus = parse_cpu_list("0-1,8-9")
    placement = Placement(Policy.EXCLUSIVE, tuple(map(CpuId, (0, 8, 1, 9))), cpus, cpus)
    written_on = PodPlacement(PodUid("db"), NodeName(node), TWO.fingerprint, OnFailure.WAIT, placement)
    cluster.create_pod(
        "launcher",
        uid="db",
        vmi="db",
        node=node,
        request=write_request(PodRequest(request_with(4))),
        annotations={PLACEMENT: written_on.to_json()},
    )
    ledger = await cluster.create_ledger(NodeName(node))
    if owned:
        await cluster.write_ledger(ledger, taking(claim("db", *owned)))
    objects.put("pods", pod_document("launcher", "db", **status))
    objects.put("virtualmachineinstances", vmi())


def printed(found: Explanation) -> str:
    return "\n".join(line for seat in found.seats for line in seat_lines(seat))


async def test_devices_of_a_vm_are_reported_with_their_numa_nodes(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    vf = ResourceName("intel.com/vf")
    given = (PodDevice(vf, NumaId(1), "0000:c1:00.2"), PodDevice(vf, NO_NUMA))
    cluster.put_topology("worker", TWO, devices=DeviceReport(NodeDevices(), {PodUid("db"): given}))
    found = await explained(objects, cluster, "vm/db")
    assert "devices     intel.com/vf 0000:c1:00.2 on NUMA 1\n" in printed(found)
    assert "            intel.com/vf on no known NUMA node\n" in printed(found)
    (document,) = explanation_document(found)["pods"]
    assert [one["numaNode"] for one in document["devices"]] == [1, -1]


async def test_the_fix_for_an_sriov_interface_without_a_device_is_reported(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    objects.put("virtualmachineinstances", vmi(devices={"interfaces": [{"name": "fast", "sriov": {}}]}))
    (note,) = (await explained(objects, cluster, "vm/db")).notes
    assert note.startswith("its pod requests no device for each of its SR-IOV interfaces (fast): install")


async def test_a_pod_on_a_node_of_dra_driver_cpu_states_that_its_cores_stay(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    assert not any("dra-driver-cpu" in note for note in (await explained(objects, cluster, "vm/db")).notes)
    cluster.put_topology("worker", TWO, enforcement=Enforcement.DRA)
    found = await explained(objects, cluster, "vm/db")
    assert (
        "dra-driver-cpu sets its cpuset (enforcement dra): it gets no other cores while it runs"
        in found.notes
    )


async def test_devices_of_resource_claims_are_reported_with_claim_and_numa_node(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    (pod,) = cluster._pods.records.values()
    written = PodPlacement.from_json(pod.placement)
    written = replace(written, placement=replace(written.placement, numa_nodes=(NumaId(0),)))
    cluster._put_pod(replace(pod, placement=written.to_json(), resource_claims=("db-io", "cores")))
    gpus = tuple(SliceDevice(f"gpu{node}", NumaId(node)) for node in (0, 1))
    cluster.put_slice(SliceRecord("gpus", "gpu.example.com", "worker", 1, NodeName("worker"), gpus))
    given = tuple(("gpu.example.com", "worker", name) for name in ("gpu0", "gpu1", "gone"))
    cluster.put_resource_claim(ResourceClaimRecord("default", "db-io", (), given))
    cores = (("dra.cpu", "worker", "cpudevmachine"),)
    cluster.put_resource_claim(ResourceClaimRecord("default", "cores", (), cores))
    found = await explained(objects, cluster, "vm/db")
    assert "devices     gpu.example.com gpu0 of ResourceClaim db-io on NUMA 0 (local)\n" in printed(found)
    assert " gpu.example.com gpu1 of ResourceClaim db-io on NUMA 1 (not local)\n" in printed(found)
    assert " gpu.example.com gone of ResourceClaim db-io on no known NUMA node\n" in printed(found)
    assert "dra.cpu" not in printed(found)
    (document,) = explanation_document(found)["pods"]
    assert [(one["claim"], one["local"]) for one in document["devices"]] == [
        ("db-io", True),
        ("db-io", False),
        ("db-io", None),
    ]


async def test_resource_claims_that_cannot_be_read_are_named(
    objects: Objects, cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    (pod,) = cluster._pods.records.values()
    cluster._put_pod(replace(pod, resource_claims=("db-io",)))
    read_all = cluster.read_all

    async def denied(kind: Any, *rest: Any) -> Any:
        if kind.name == "resourceclaims":
            raise Refused("resourceclaims are forbidden")
        return await read_all(kind, *rest)

    monkeypatch.setattr(cluster, "read_all", denied)
    notes = (await explained(objects, cluster, "vm/db")).notes
    assert "the devices of its ResourceClaims cannot be read: resourceclaims are forbidden" in notes


async def test_a_paused_vm_and_a_migration_are_reported_as_kubevirt_reports_them(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    conditions = [
        {"type": "Paused", "status": "True", "message": "VMI was paused by user"},
        {"type": "LiveMigratable", "status": "False", "message": "it has a local disk"},
        {"type": "Synchronized", "status": "False", "message": "the hook refuses"},
    ]
    migrating = {"sourceNode": "worker", "targetNode": "other"}
    status = {"conditions": conditions, "migrationState": migrating}
    objects.put("virtualmachineinstances", {**vmi(), "status": status})
    command = "`virtctl unpause vmi db -n default`"
    assert (await explained(objects, cluster, "vm/db")).notes == (
        f"it is paused: its vCPUs stand still, and it keeps its cores; {command} continues it",
        "it migrates live from worker to other",
        "KubeVirt reports Synchronized is false: the hook refuses",
    )
    failed = {**migrating, "completed": True, "failed": True, "failureReason": "no room"}
    objects.put("virtualmachineinstances", {**vmi(), "status": {"migrationState": failed}})
    assert (await explained(objects, cluster, "vmi/db")).notes == ("its last live migration failed: no room",)


async def test_a_vm_whose_cores_the_ledger_gives_to_another_pod_is_reported(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 8)
    found = await explained(objects, cluster, "vm/db")
    assert "CPUs 1,9 of these have no owner in the ledger of the node" in printed(found)
    record = await cluster.read_ledger(WORKER)
    assert record is not None
    await cluster.write_ledger(record, taking(claim("web", 1)))
    found = await explained(objects, cluster, "vm/db")
    assert "CPUs 1,9 of these belong to default/pod-web in the ledger of the node" in printed(found)
    (document,) = explanation_document(found)["pods"]
    assert document["unclaimed"] == "1,9"


async def test_a_measurement_of_a_node_that_is_down_or_gone_is_called_old(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    assert "not Ready" not in printed(await explained(objects, cluster, "vm/db"))
    objects.nodes = [{**node(), "status": {}}]
    assert "the node is not Ready" in printed(await explained(objects, cluster, "vm/db"))


async def test_a_pod_of_a_deleted_node_reports_its_future(objects: Objects, cluster: FaultyCluster) -> None:
    await bound(objects, cluster, node="deleted")
    found = await explained(objects, cluster, "vm/db")
    assert "the API server has no such node any more" in printed(found)


async def test_a_bound_pod_reports_the_reason_why_its_containers_wait(
    objects: Objects, cluster: FaultyCluster
) -> None:
    waiting = {
        "compute": {"waiting": {"reason": "ContainerCreating"}},
        "disk": {"waiting": {"reason": "ImagePullBackOff", "message": "no such\n image"}},
        "hook-sidecar-0": {"running": {}},
        "hook-sidecar-1": {"running": {}},
    }
    statuses = [{"name": name, "state": state, "ready": False} for name, state in waiting.items()]
    await bound(objects, cluster, 0, 1, 8, 9, containerStatuses=statuses)
    commands = {"hook-sidecar-0": ["somebody-elses"], "hook-sidecar-1": ["kvplace-hook"]}
    objects.stored["pods", "launcher"]["spec"]["containers"] = [
        {"name": name, "command": command} for name, command in commands.items()
    ]
    assert (await explained(objects, cluster, "vm/db")).notes == (
        "container disk waits: ImagePullBackOff: no such image",
        (
            "container hook-sidecar-1 runs and is not ready; `kubectl -n default exec launcher "
            "-c hook-sidecar-1 -- kvplace-hook ready --once` prints why"
        ),
        "the kubelet prepares its volumes, network and images; the events name the cause of the wait",
    )


async def test_a_vm_whose_name_begins_like_another_one_is_not_mixed_up_with_it(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    cluster.create_pod("launcher-2", vmi="db-2", request=write_request(PodRequest(request_with(4))))
    objects.put("pods", pod_document("launcher-2", "uid-2"))
    found = await explained(objects, cluster, "vm/db")
    assert [seat.vm.pod.name for seat in found.seats] == ["launcher"]
    assert (found.notes, found.fitting) == ((), None)


async def test_a_pod_that_outlives_its_qemu_names_its_running_containers_and_not_missing_cores(
    objects: Objects, cluster: FaultyCluster
) -> None:
    ended = {"name": "compute", "state": {"terminated": {"exitCode": 2}}}
    hook = {"name": "hook-sidecar-0", "state": {"running": {}}}
    await bound(objects, cluster, containerStatuses=[ended, hook])
    cluster.change_pod("default", "launcher", phase="Running", compute_terminated=True)
    found = await explained(objects, cluster, "vm/db")
    assert found.state == "Ending"
    (note,) = found.notes
    assert note == (
        "its QEMU in pod launcher has ended and container hook-sidecar-0 still runs; while it does, KubeVirt "
        "starts no migration of the VM; if it lasts, `kubectl -n default delete pod launcher` ends it"
    )
    assert "have no owner" not in printed(found)
    assert "not measured any more: its QEMU has ended" in printed(found)
