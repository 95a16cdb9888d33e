"""What is read about a VM, from the day it is only written down to the day it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from kvplace.admission.stated_request import stated_request
from kvplace.cli.explain_lines import seat_lines
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Absent, BadAnnotation
from kvplace.core.ledger import LedgerChange
from kvplace.core.marks import PINNED
from kvplace.core.neighbours import Nearness
from kvplace.core.placement import PLACEMENT, Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.request_document import PodRequest, write_request
from kvplace.core.reservation import reserve
from kvplace.core.scalars import NO_CPUS, CpuId, NodeName, NumaId, PackageId, PodUid
from kvplace.explain.explanation import Explanation
from kvplace.explain.reading import (
    explain_document,
    explain_target,
    read_target,
)
from kvplace.explain.report import explanation_document
from kvplace.kube.conditions import Condition
from kvplace.kube.object_reader import ApiKind, Document
from tests.admission.makers import vm, vmi
from tests.core.requests import request_with
from tests.kube.claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

T = TypeVar("T")
WORKER = NodeName("worker")
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
LABELS = {"kubevirt.io/schedulable": "true"}


def node(name: str = "worker", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": LABELS}, "spec": spec, "status": READY}


class Objects:
    """The objects of a cluster that only `explain` looks at."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Document] = {}
        self.nodes: list[Document] = [node()]
        self.events: list[Document] = []
        self.elsewhere: list[Document] = []
        """Objects of other namespaces."""

    def put(self, resource: str, document: Document) -> None:
        self.stored[resource, document["metadata"]["name"]] = document

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        assert namespace == "default"
        return self.stored.get((kind.resource, name))

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        if kind.resource != "events":
            assert namespace == ""
            return tuple(
                one for one in self.elsewhere if fields == f"metadata.name={one['metadata']['name']}"
            )
        return tuple(
            event
            for event in self.events
            if f"involvedObject.kind={event['involvedObject']['kind']},"
            f"involvedObject.name={event['involvedObject']['name']}" == fields
        )

    async def read_list_as(
        self, form: type[T], kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[T, ...]:
        assert kind.resource == "nodes"
        return tuple(msgspec.convert(one, form) for one in self.nodes)


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def cluster() -> FaultyCluster:
    made = FaultyCluster()
    made.create_node("worker", topology=TWO)
    return made


def stated(document: Document, namespace: str) -> PodRequest | None:
    return stated_request(document, namespace=namespace)


async def explained(objects: Objects, cluster: FaultyCluster, target: str) -> Explanation:
    found = await explain_target(objects, cluster, read_target(target, "default"), stated, Strategy.PACK)
    assert explanation_document(found)["name"] == found.name
    return found


async def written(objects: Objects, cluster: FaultyCluster, document: Document) -> Explanation:
    return await explain_document(objects, cluster, document, "default", stated, Strategy.PACK)


def pod_document(name: str, uid: str, **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": {"schedulerName": "kvplace-scheduler"},
        "status": status,
    }


def event(kind: str, name: str, when: str, message: str, **other: Any) -> Mapping[str, Any]:
    return {
        "metadata": {"name": f"{name}.{when}"},
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": when,
        "reason": "Tested",
        "message": message,
        **other,
    }


async def test_a_vm_that_is_only_written_down_is_asked_of_every_node(
    objects: Objects, cluster: FaultyCluster
) -> None:
    found = await written(objects, cluster, vm())
    assert found.state == "NotCreated"
    assert found.fitting is not None
    assert [one.node for one in found.fitting.candidates] == ["worker"]
    assert not found.fits_nowhere
    too_large = vm(cpu={"sockets": 1, "cores": 9, "threads": 1})
    assert (await written(objects, cluster, too_large)).fits_nowhere


async def test_the_pod_of_a_vm_goes_only_where_virt_handler_runs(
    objects: Objects, cluster: FaultyCluster
) -> None:
    objects.nodes = [{**node(), "metadata": {"name": "worker"}}]
    found = await written(objects, cluster, vm())
    assert found.fitting is not None
    (obstacle,) = found.fitting.obstacles
    assert obstacle.sentence == "the node does not have the label kubevirt.io/schedulable=true"
    assert obstacle.would_fit == ("worker",)


async def test_a_mistake_in_a_file_is_said_as_admission_would(
    objects: Objects, cluster: FaultyCluster
) -> None:
    with pytest.raises(BadAnnotation, match="did you mean 'one-numa'"):
        await written(objects, cluster, vm({"cpu-set": "one-num"}))


async def test_a_vm_that_asks_for_nothing_is_left_alone(objects: Objects, cluster: FaultyCluster) -> None:
    found = await written(objects, cluster, vm(None))
    assert (found.request, found.fitting, found.fits_nowhere) == (None, None, False)
    assert found.notes == ("it asks for no cores: kvplace leaves it alone",)


async def test_a_name_that_nobody_has_is_an_error_that_says_where_to_look(
    objects: Objects, cluster: FaultyCluster
) -> None:
    with pytest.raises(Absent, match=r"there is no VirtualMachine default/nobody; .* get vms -A"):
        await explained(objects, cluster, "vm/nobody")
    cluster.create_pod("launcher", vmi="database", request=write_request(PodRequest(request_with(4))))
    with pytest.raises(Absent, match=r"default/databse; did you mean 'database'\?"):
        await explained(objects, cluster, "vm/databse")
    objects.elsewhere = [{"metadata": {"name": "databse", "namespace": name}} for name in ("shop", "lab")]
    with pytest.raises(Absent, match="one of this name in lab, shop: choose its namespace with -n"):
        await explained(objects, cluster, "vm/databse")


async def test_a_stopped_vm_is_explained_by_its_template_in_the_state_that_kubevirt_gives(
    objects: Objects, cluster: FaultyCluster
) -> None:
    missing = {"type": "Ready", "status": "False", "message": "VMI does not exist"}
    objects.put(
        "virtualmachines", {**vm(), "status": {"printableStatus": "Stopped", "conditions": [missing]}}
    )
    found = await explained(objects, cluster, "vm/db")
    assert (found.state, found.notes) == ("Stopped", ("KubeVirt says Ready is false: VMI does not exist",))
    assert found.fitting is not None


async def test_a_file_that_was_exported_from_a_cluster_is_no_running_vm(
    objects: Objects, cluster: FaultyCluster
) -> None:
    found = await written(objects, cluster, {**vm(), "status": {"printableStatus": "Running"}})
    assert (found.state, found.notes) == ("NotCreated", ())


async def test_a_pod_that_admission_never_saw_is_named(objects: Objects, cluster: FaultyCluster) -> None:
    objects.put("virtualmachineinstances", {**vmi(), "status": {"activePods": {"some-uid": ""}}})
    found = await explained(objects, cluster, "vmi/db")
    assert any("created without kvplace's webhooks" in note for note in found.notes)


async def test_a_vm_that_asks_for_nothing_gets_no_advice_to_delete_its_pod(
    objects: Objects, cluster: FaultyCluster
) -> None:
    running = {"activePods": {"some-uid": ""}}
    objects.put("virtualmachineinstances", {**vmi(annotations={}), "status": running})
    found = await explained(objects, cluster, "vmi/db")
    assert found.notes == ("it asks for no cores: kvplace leaves it alone",)


@pytest.mark.parametrize(
    ("where", "key", "note"),
    [
        ("annotations", "cpu-sets", "annotation cpu-sets has no effect: did you mean cpu-set?"),
        (
            "labels",
            "cpu-policy",
            "label cpu-policy has no effect: write the annotation kvplace.io/cpu-policy",
        ),
        ("labels", "cpu-set", "label cpu-set has no effect: write the annotation cpu-set"),
    ],
)
async def test_a_vm_that_asks_with_a_key_that_nothing_reads_is_told_the_right_one(
    objects: Objects, cluster: FaultyCluster, where: str, key: str, note: str
) -> None:
    document = vm(None)
    document["spec"]["template"]["metadata"] = {where: {key: "one-numa"}}
    assert (await written(objects, cluster, document)).notes[1:] == (note,)


async def test_a_vm_that_asks_beside_its_template_is_told_where_to_ask(
    objects: Objects, cluster: FaultyCluster
) -> None:
    document = vm(None)
    document["metadata"]["annotations"] = {"cpu-set": "one-numa"}
    assert (await written(objects, cluster, document)).notes[1:] == (
        "annotation cpu-set has no effect here: move it to spec.template.metadata.annotations",
    )


async def test_a_waiting_vm_says_what_kube_scheduler_says_and_what_keeps_it_from_each_node(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await cluster.write_ledger(
        await cluster.create_ledger(WORKER), taking(claim("other", *range(14), memory={}))
    )
    pod = cluster.create_pod("launcher", vmi="db", request=write_request(PodRequest(request_with(4))))
    said = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    objects.put("pods", pod_document("launcher", pod.uid, conditions=[said]))
    objects.put("virtualmachineinstances", vmi())
    objects.events = [event("VirtualMachineInstance", "db", "2026-01-01T00:00:00Z", "it\n does not fit")]
    found = await explained(objects, cluster, "vm/db")
    assert found.state == "Waiting"
    assert "kube-scheduler says: 0/1 nodes are available" in found.notes
    assert found.fits_nowhere
    assert found.fitting is not None
    assert found.fitting.refusals.summary == "1 node: no socket with 4 free CPUs, best 2 on worker socket 1"
    assert [one.note for one in found.events] == ["it does not fit"]


async def test_a_waiting_pod_that_nobody_looks_at_is_named_with_its_scheduler(
    objects: Objects, cluster: FaultyCluster
) -> None:
    pod = cluster.create_pod("solver", request=write_request(PodRequest(request_with(4))))
    objects.put("pods", pod_document("solver", pod.uid))
    found = await explained(objects, cluster, "pod/solver")
    assert found.notes == (
        "no scheduler has looked at it yet: does one run under the name kvplace-scheduler?",
    )
    assert not found.fits_nowhere


async def test_a_waiting_pod_whose_cores_are_claimed_or_reserved_says_where(
    objects: Objects, cluster: FaultyCluster
) -> None:
    pod = cluster.create_pod("solver", request=write_request(PodRequest(request_with(2))))
    stored = await cluster.write_ledger(await cluster.create_ledger(WORKER), taking(claim(pod.uid, 0, 8)))
    found = await explained(objects, cluster, "pod/solver")
    assert found.notes[0] == "its cores are claimed on worker already; the binding is under way"

    record = await cluster.write_ledger(stored, LedgerChange((claim("db", 1, 9),), (pod.uid,)))
    kept = reserve(record.ledger, claim(pod.uid, 0, 1, 8, 9), but=NO_CPUS, until="2026-01-02T03:05:00Z")
    await cluster.write_ledger(record, taking(kept))
    found = await explained(objects, cluster, "pod/solver")
    assert found.notes[0] == (
        "room is made for it on worker: CPUs 0-1,8-9 are reserved for it until 2026-01-02T03:05:00Z unless "
        "that is renewed; CPUs 1,9 of them are still in use"
    )


async def test_a_running_vm_says_where_it_sits_whether_that_is_measured_and_who_is_beside_it(
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


async def test_a_paused_vm_and_a_migration_are_said_as_kubevirt_reports_them(
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
        f"it is paused: its vCPUs stand still, and it keeps its cores; {command} lets it go on",
        "it migrates live from worker to other",
        "KubeVirt says Synchronized is false: the hook refuses",
    )
    failed = {**migrating, "completed": True, "failed": True, "failureReason": "no room"}
    objects.put("virtualmachineinstances", {**vmi(), "status": {"migrationState": failed}})
    assert (await explained(objects, cluster, "vmi/db")).notes == ("its last live migration failed: no room",)


async def test_a_vm_whose_cores_the_ledger_gives_to_somebody_else_is_told_so(
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


async def test_what_was_measured_on_a_node_that_is_away_or_gone_is_called_old(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, 0, 1, 8, 9)
    assert "not Ready" not in printed(await explained(objects, cluster, "vm/db"))
    objects.nodes = [{**node(), "status": {}}]
    assert "the node is not Ready" in printed(await explained(objects, cluster, "vm/db"))


async def test_a_pod_of_a_deleted_node_says_what_becomes_of_it(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await bound(objects, cluster, node="deleted")
    found = await explained(objects, cluster, "vm/db")
    assert "the API server has no such node any more" in printed(found)


async def test_a_bound_pod_says_what_its_containers_wait_for(
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
            "-c hook-sidecar-1 -- kvplace-hook ready --once` says why"
        ),
        "the kubelet prepares its volumes, network and images; the events say what is missing",
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


async def test_cores_of_pods_that_are_gone_are_named_to_a_vm_that_waits(
    objects: Objects, cluster: FaultyCluster
) -> None:
    await cluster.write_ledger(await cluster.create_ledger(WORKER), taking(claim("lost", 1)))
    pod = cluster.create_pod("launcher", vmi="db", request=write_request(PodRequest(request_with(4))))
    objects.put("pods", pod_document("launcher", pod.uid))
    found = await explained(objects, cluster, "vm/db")
    assert "cores on worker are held for pods that were not found; ask `kvplace doctor`" in found.notes


async def test_during_a_migration_both_pods_are_shown_and_the_one_that_waits_is_explained(
    objects: Objects, cluster: FaultyCluster
) -> None:
    request = write_request(PodRequest(replace(request_with(4))))
    cluster.create_pod("source", vmi="db", node="worker", request=request)
    cluster.create_pod("target", vmi="db", request=request)
    objects.put("virtualmachineinstances", vmi())
    found = await explained(objects, cluster, "vmi/db")
    assert [seat.vm.pod.name for seat in found.seats] == ["source"]
    assert found.state == found.seats[0].vm.state.value
    assert found.notes[0] == "pod target, to which it shall migrate live, has no node yet"
    assert found.fitting is not None
    (obstacle,) = found.fitting.obstacles
    assert (obstacle.nodes, obstacle.would_fit) == (("worker",), ("worker",))
    assert "a live migration goes to another node" in obstacle.sentence
    assert found.fits_nowhere


async def test_a_vm_that_starts_again_waits_and_says_that_its_former_pod_is_still_there(
    objects: Objects, cluster: FaultyCluster
) -> None:
    request = write_request(PodRequest(replace(request_with(4))))
    cluster.create_pod("former", vmi="db", node="worker", request=request)
    cluster.delete_pod("default", "former")
    cluster.create_pod("launcher", vmi="db", request=request)
    objects.put("virtualmachineinstances", vmi())
    found = await explained(objects, cluster, "vmi/db")
    assert found.state == "Waiting"
    assert found.notes[0] == "its former pod former has not ended yet"
    assert not found.fits_nowhere
