"""The facts that are read about a VM, from the day it is only written down to the day it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.claim_changes import reserve, reserve_for_migration
from kvplace.core.errors import Absent, BadAnnotation
from kvplace.core.ledger import LedgerChange
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NO_CPUS, NodeName
from tests.admission.reviewed_objects import vm, vmi
from tests.core.requests import request_with
from tests.explain.small_cluster import WORKER, Objects, event, explained, node, pod_document, written
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster


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


async def test_a_mistake_in_a_file_is_reported_as_admission_would(
    objects: Objects, cluster: FaultyCluster
) -> None:
    with pytest.raises(BadAnnotation, match="did you mean 'one-numa'"):
        await written(objects, cluster, vm({"cpu-set": "one-num"}))


async def test_a_vm_with_a_request_for_nothing_is_left_alone(
    objects: Objects, cluster: FaultyCluster
) -> None:
    found = await written(objects, cluster, vm(None))
    assert (found.request, found.fitting, found.fits_nowhere) == (None, None, False)
    assert found.notes == ("it requests no cores, so kvplace does not change it",)


async def test_an_unknown_name_is_an_error_that_names_where_to_check(
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
    assert (found.state, found.notes) == ("Stopped", ("KubeVirt reports Ready is false: VMI does not exist",))
    assert found.fitting is not None


async def test_a_file_that_was_exported_from_a_cluster_is_not_a_running_vm(
    objects: Objects, cluster: FaultyCluster
) -> None:
    found = await written(objects, cluster, {**vm(), "status": {"printableStatus": "Running"}})
    assert (found.state, found.notes) == ("NotCreated", ())


async def test_a_pod_that_admission_never_saw_is_named(objects: Objects, cluster: FaultyCluster) -> None:
    objects.put("virtualmachineinstances", {**vmi(), "status": {"activePods": {"some-uid": ""}}})
    found = await explained(objects, cluster, "vmi/db")
    assert any("created without kvplace's webhooks" in note for note in found.notes)


async def test_a_vm_with_a_request_for_nothing_gets_no_advice_to_delete_its_pod(
    objects: Objects, cluster: FaultyCluster
) -> None:
    running = {"activePods": {"some-uid": ""}}
    objects.put("virtualmachineinstances", {**vmi(annotations={}), "status": running})
    found = await explained(objects, cluster, "vmi/db")
    assert found.notes == ("it requests no cores, so kvplace does not change it",)


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
async def test_a_vm_with_a_misspelt_key_is_reported_with_the_right_one(
    objects: Objects, cluster: FaultyCluster, where: str, key: str, note: str
) -> None:
    document = vm(None)
    document["spec"]["template"]["metadata"] = {where: {key: "one-numa"}}
    assert (await written(objects, cluster, document)).notes[1:] == (note,)


async def test_a_vm_with_a_request_beside_its_template_is_reported_with_the_right_place(
    objects: Objects, cluster: FaultyCluster
) -> None:
    document = vm(None)
    document["metadata"]["annotations"] = {"cpu-set": "one-numa"}
    assert (await written(objects, cluster, document)).notes[1:] == (
        "annotation cpu-set has no effect here: move it to spec.template.metadata.annotations",
    )


async def test_a_waiting_vm_shows_the_message_of_kube_scheduler_and_the_obstacle_on_each_node(
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
    assert "kube-scheduler reports: 0/1 nodes are available" in found.notes
    assert found.fits_nowhere
    assert found.fitting is not None
    assert found.fitting.refusals.summary == "1 node: no socket with 4 free CPUs, best 2 on worker socket 1"
    assert [one.note for one in found.events] == ["it does not fit"]


async def test_a_waiting_pod_that_no_client_checks_is_named_with_its_scheduler(
    objects: Objects, cluster: FaultyCluster
) -> None:
    pod = cluster.create_pod("solver", request=write_request(PodRequest(request_with(4))))
    objects.put("pods", pod_document("solver", pod.uid))
    found = await explained(objects, cluster, "pod/solver")
    assert found.notes == ("no scheduler has tried it yet: does one run under the name kvplace-scheduler?",)
    assert not found.fits_nowhere


async def test_a_waiting_pod_whose_cores_are_claimed_or_reserved_states_where(
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


@pytest.mark.parametrize("bound", [False, True])
async def test_a_waiting_pod_states_which_vm_migrates_to_make_room_for_it(
    objects: Objects, cluster: FaultyCluster, *, bound: bool
) -> None:
    pod = cluster.create_pod("solver", request=write_request(PodRequest(request_with(2))))
    request = write_request(PodRequest(request_with(4)))
    source = cluster.create_pod("source", vmi="db", node="worker", request=request)
    here = taking(claim(source.uid, 0, 8))
    record = await cluster.write_ledger(await cluster.create_ledger(WORKER), here)
    kept = reserve(record.ledger, claim(pod.uid, 0, 8), but=NO_CPUS, until="2026-01-02T03:05:00Z")
    await cluster.write_ledger(record, taking(kept))
    cluster.create_node("other")
    if bound:
        cluster.create_pod("target", vmi="db", node="other", request=request, migration="kvplace-db-1")
    else:
        whole = claim(source.vmi_uid, 1, 9)
        there = reserve_for_migration(whole, "kvplace-db-1", until="2026-01-02T03:05:00Z")
        await cluster.write_ledger(await cluster.create_ledger(NodeName("other")), taking(there))
    found = await explained(objects, cluster, "pod/solver")
    assert found.notes[1] == "for that default/db migrates to other (migration kvplace-db-1)"
    assert not any("were not found" in note for note in found.notes)


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
    assert found.notes[0] == "pod target, the target of its live migration, has no node yet"
    assert found.fitting is not None
    (obstacle,) = found.fitting.obstacles
    assert (obstacle.nodes, obstacle.would_fit) == (("worker",), ("worker",))
    assert "a live migration goes to another node" in obstacle.sentence
    assert found.fits_nowhere


async def test_a_vm_that_starts_again_waits_and_states_that_its_former_pod_is_still_there(
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
