"""Runs of rollouts on a cluster in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pytest

from kvplace.core.errors import Absent, Conflict, ExitCode, Forbidden, Refused, Unavailable
from kvplace.core.vm_stages import VmStage
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_errors import Denied
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.reported_vms import LAUNCHERS
from kvplace.kube.watches import EVERYTHING, Kind, Selector
from kvplace.nodes.planning_cluster import PlanningCluster
from kvplace.rollout.report import Report
from kvplace.rollout.rollouts import Rollouts
from kvplace.rollout.templates import read_rollout
from tests.rollout.examples import (
    advance,
    everywhere,
    moving,
    one_server,
    rollout,
    rollouts_of,
    vm,
    vmi,
)
from tests.rollout.memory_rollouts import NAMESPACE, MemoryRollouts

K = TypeVar("K")
R = TypeVar("R")
NAMES = [f"web-{number:02}" for number in range(1, 7)]


async def created(cluster: MemoryRollouts, **keys: Any) -> Report:
    rollouts = rollouts_of(cluster)
    return await rollouts.create(await rollouts.prepare(rollout(**keys)))


@pytest.mark.parametrize("template", [vm(), vmi()])
async def test_every_vm_is_made_once_and_followed_until_it_is_pinned(template: dict[str, Any]) -> None:
    cluster = MemoryRollouts()
    async with moving(cluster):
        report = await created(cluster, template=template)
    assert cluster.applied == NAMES
    assert report.document() == {
        "created": 6,
        "bound": 6,
        "running": 6,
        "pinned": 6,
        "failed": [],
        "seconds": {
            stage: {key: pytest.approx(0, abs=60) for key in ("p50", "p95", "max")}
            for stage in ("bound", "running", "pinned")
        },
    }
    assert report.exit_code is ExitCode.DONE
    for name in NAMES:
        made = cluster.manifests[name]
        assert made["metadata"]["labels"][ROLLOUT_LABEL] == "web"
        if made["kind"] == "VirtualMachine":
            assert made["metadata"]["labels"]["app"] == "web"
            assert made["spec"]["template"]["metadata"]["labels"] == {ROLLOUT_LABEL: "web"}


async def test_no_more_vms_than_allowed_are_on_their_way() -> None:
    cluster = MemoryRollouts()
    most = 0

    def step(cluster: MemoryRollouts, name: str) -> None:
        nonlocal most
        most = max(most, len(cluster.waiting))
        advance(cluster, name)

    async with moving(cluster, step):
        await created(cluster, maxInFlight=2)
    assert most <= 2
    assert cluster.applied == NAMES


async def test_a_wave_that_fails_too_often_is_the_last_one() -> None:
    cluster = MemoryRollouts()
    async with moving(cluster, lambda cluster, name: cluster.fail(name, "no such image")):
        report = await created(cluster, waves=[2], maxFailures=2)
    assert cluster.applied == NAMES[:2]
    assert [one.name for one in report.failed] == NAMES[:2]
    assert "no such image" in report.failed[0].reason
    assert [one.reason for one in report.unfinished] == ["not made"] * 4
    assert report.exit_code is ExitCode.PARTLY_DONE


async def test_vms_that_do_not_fit_are_not_made_and_named_with_the_reason() -> None:
    cluster = MemoryRollouts()
    async with moving(cluster):
        report = await created(cluster, template=vm(cores=20))
    assert cluster.applied == NAMES[:3]
    assert [one.name for one in report.failed] == NAMES[3:]
    assert all("does not fit: 1 node:" in one.reason for one in report.failed)
    assert report.exit_code is ExitCode.PARTLY_DONE


async def test_vms_that_do_not_fit_are_made_when_they_are_to_wait_for_room() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        prepared = await rollouts.prepare(rollout(template=vm(cores=20)))
        report = await rollouts.create(prepared, everything=True)
    assert cluster.applied == NAMES
    assert report.exit_code is ExitCode.DONE


@pytest.mark.parametrize(
    ("template", "goal"),
    [
        (vm(annotations={"app": "no-request"}), VmStage.RUNNING),
        (vm(run="Halted"), VmStage.CREATED),
        (vm(annotations={"cpu-set": "any", "kvplace.io/on-failure": "float"}), VmStage.RUNNING),
        (vm(annotations={"kvplace.io/smt": "require"}), VmStage.RUNNING),
        (vm(annotations={"kvplace.io/cpu-policy": "none"}), VmStage.RUNNING),
    ],
)
async def test_a_vm_that_is_never_pinned_is_not_waited_for(template: dict[str, Any], goal: VmStage) -> None:
    cluster = MemoryRollouts()

    def step(cluster: MemoryRollouts, name: str) -> None:
        cluster.bind(name)
        cluster.run(name)

    async with moving(cluster, step):
        report = await created(cluster, template=template)
    assert report.exit_code is ExitCode.DONE
    assert report.counts.reached[goal] == 6
    assert report.counts.reached[VmStage.PINNED] == 0


async def test_a_vm_that_a_user_deletes_is_not_made_again() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)

    def step(cluster: MemoryRollouts, name: str) -> None:
        if name == "web-02":
            uid = next(one.uid for one in cluster.vms if one.name == name)
            tasks.add(asyncio.ensure_future(cluster.delete_vm("VirtualMachine", NAMESPACE, name, uid)))
        else:
            advance(cluster, name)

    tasks: set[asyncio.Future[None]] = set()
    async with moving(cluster, step):
        report = await rollouts.create(await rollouts.prepare(rollout()))
    await asyncio.gather(*tasks)
    assert [(one.name, one.reason) for one in report.failed] == [
        ("web-02", "it was deleted while the rollout ran")
    ]
    assert cluster.applied == NAMES


@pytest.mark.parametrize("told", [False, True])
async def test_a_guest_that_shuts_down_after_it_was_pinned_has_not_failed(*, told: bool) -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)

    def step(cluster: MemoryRollouts, name: str) -> None:
        if name != "web-05":
            advance(cluster, name)
        if name == "web-06":
            cluster.end("web-01", told=told)
            advance(cluster, "web-05")
            cluster.end("web-05", told=told)

    async with moving(cluster, step):
        report = await rollouts.create(await rollouts.prepare(rollout(template=vm(run="Once"))))
    for one in (report, await rollouts.status("web")):
        assert (one.failed, one.unfinished) == ((), ())
        assert one.counts.reached[VmStage.PINNED] == 6
        assert one.exit_code is ExitCode.DONE


async def test_a_guest_that_shuts_down_before_it_was_pinned_has_failed() -> None:
    cluster = MemoryRollouts()

    def step(cluster: MemoryRollouts, name: str) -> None:
        cluster.bind(name)
        cluster.run(name)
        if name == "web-03":
            cluster.end(name)
        else:
            cluster.pin(name)

    async with moving(cluster, step):
        report = await created(cluster, template=vm(run="Once"))
    assert [(one.name, one.reason) for one in report.failed] == [
        ("web-03", "its guest shut down before it was pinned")
    ]
    assert (report.counts.ready, report.counts.failed) == (5, 1)


async def test_a_vm_of_which_only_the_instance_is_left_is_missing() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        await created(cluster)
    cluster.orphan("web-03")
    prepared = await rollouts.prepare(await rollouts.stored("web"))
    assert [vm.name for vm in prepared.missing] == list(prepared.forecast.nodes) == ["web-03"]


async def test_a_vm_whose_instance_lost_its_label_is_still_of_its_rollout() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        await created(cluster)
    cluster.relabel_instance("web-03")
    assert (await rollouts.prepare(await rollouts.stored("web"))).missing == ()


async def test_watches_that_list_again_change_nothing() -> None:
    cluster = MemoryRollouts()

    def step(cluster: MemoryRollouts, name: str) -> None:
        cluster.forget_the_past()
        advance(cluster, name)

    async with moving(cluster, step):
        report = await created(cluster)
    assert cluster.applied == NAMES
    assert report.exit_code is ExitCode.DONE


class Breaking(MemoryRollouts):
    """Fails at one write, before or after it has been carried out."""

    def __init__(self, at: int, *, done: bool, error: Exception | None = None) -> None:
        super().__init__()
        self._at = at
        self._done = done
        self._error = error
        self.writes = 0

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        if dry_run:
            return
        self.writes += 1
        breaks = self.writes == self._at
        if breaks and not self._done:
            raise self._error or asyncio.CancelledError
        await super().apply_vm(vm)
        if breaks:
            raise self._error or asyncio.CancelledError


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", range(1, 7))
async def test_an_answer_that_is_lost_makes_no_vm_twice_and_loses_none(at: int, *, done: bool) -> None:
    cluster = Breaking(at, done=done, error=Unavailable("the connection broke"))
    async with moving(cluster):
        report = await created(cluster)
    assert sorted(cluster.applied) == NAMES
    assert report.exit_code is ExitCode.DONE


@pytest.mark.parametrize("in_flight", [1, 3, 6])
@pytest.mark.parametrize("at", range(1, 7))
async def test_a_run_that_is_stopped_at_any_vm_is_resumed_with_every_vm_once(at: int, in_flight: int) -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    run = await rollouts.begin(await rollouts.prepare(rollout(maxInFlight=in_flight)))

    def step(cluster: MemoryRollouts, name: str) -> None:
        if name == NAMES[at - 1]:
            run.stop()
        advance(cluster, name)

    async with moving(cluster, step):
        stopped = await run.run()
        assert stopped.interrupted == (len(cluster.applied) < 6 or bool(stopped.unfinished))
        report = await rollouts.create(await rollouts.prepare(await rollouts.stored("web")))
    assert sorted(cluster.applied) == NAMES
    assert report.exit_code is ExitCode.DONE
    assert report.counts.reached[VmStage.PINNED] == 6


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_run_that_is_killed_at_any_moment_is_resumed_with_every_vm_once(turns: int) -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        killed = asyncio.create_task(created(cluster, maxInFlight=2))
        for _ in range(turns):
            await asyncio.sleep(0)
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        report = await rollouts.create(await rollouts.prepare(rollout(maxInFlight=2)))
    assert sorted(cluster.applied) == NAMES
    assert report.exit_code is ExitCode.DONE


async def test_a_vm_that_is_stored_counts_before_its_watch_shows_it() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    run = await rollouts.begin(await rollouts.prepare(rollout(maxInFlight=2)))
    running = asyncio.create_task(run.run())
    while len(cluster.applied) < 2:  # noqa: ASYNC110 - the cluster in memory has no event for it
        await asyncio.sleep(0)
    run.stop()
    assert (await running).document()["created"] == len(cluster.applied) == 2


async def test_a_conflict_over_a_quota_is_not_another_vm_and_passes() -> None:
    said = (
        'patch virtualmachines default/web-02: Operation cannot be fulfilled on resourcequotas "small": the '
        "object has been modified; please apply your changes to the latest version and try again"
    )
    cluster = Breaking(2, done=False, error=Conflict(said))
    async with moving(cluster):
        report = await created(cluster)
    assert (report.failed, report.exit_code) == ((), ExitCode.DONE)
    assert sorted(cluster.applied) == NAMES


async def test_a_right_that_is_missing_for_single_vms_is_the_reason_of_their_failure() -> None:
    cluster = Breaking(2, done=False, error=Forbidden("exceeded quota: small"))
    async with moving(cluster):
        report = await created(cluster)
    assert [(one.name, one.reason) for one in report.failed] == [("web-02", "exceeded quota: small")]


async def test_the_same_rollout_again_goes_on_and_another_one_of_its_name_is_refused() -> None:
    cluster = MemoryRollouts()
    async with moving(cluster):
        await created(cluster)
        again = await created(cluster)
    assert cluster.applied == NAMES
    assert again.exit_code is ExitCode.DONE
    fixes = "`kvplace rollout resume web -n default` .* `kvplace rollout delete web -n default` removes it"
    with pytest.raises(Refused, match=f"there is a rollout 'web' of other VMs .*{fixes}"):
        await created(cluster, count=7)
    with pytest.raises(Refused, match=r"there is a rollout 'web' of these VMs with another timeout in"):
        await created(cluster, timeout="2h")
    cluster.documents["web"] = "{"
    with pytest.raises(Refused, match=r"there is a rollout 'web' of other VMs"):
        await created(cluster)


async def test_vms_whose_document_was_deleted_are_taken_up_again_and_not_called_too_many() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        await created(cluster)
        cluster.documents.clear()
        prepared = await rollouts.prepare(rollout())
        assert prepared.is_new
        assert not prepared.fits_nowhere
        again = await rollouts.create(prepared)
    assert again.exit_code is ExitCode.DONE
    assert await rollouts.names() == ("web",)
    assert (await rollouts_of(MemoryRollouts()).prepare(rollout(template=vm(cores=500)))).fits_nowhere


async def test_a_name_that_a_user_takes_in_the_same_moment_is_refused() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    prepared = await rollouts.prepare(rollout())
    await cluster.store_document(NAMESPACE, "web", "{}")
    with pytest.raises(Refused, match="another client has just begun"):
        await rollouts.begin(prepared)


async def test_status_reports_the_states_of_the_vms_and_delete_leaves_nothing() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)

    def step(cluster: MemoryRollouts, name: str) -> None:
        cluster.bind(name)
        cluster.now += 3
        cluster.run(name)
        if name != "web-05":
            cluster.pin(name)

    async with moving(cluster, step):
        await rollouts.create(await rollouts.prepare(rollout(until="running")))
    assert await rollouts.names() == ("web",)
    status = await rollouts.status("web")
    assert status.counts.reached == {
        VmStage.CREATED: 6, VmStage.BOUND: 6, VmStage.RUNNING: 6, VmStage.PINNED: 5
    }  # fmt: skip
    assert status.seconds[VmStage.RUNNING].p50 >= 3
    assert await rollouts.delete("web") == 6
    assert await rollouts.names() == ()
    assert not cluster.vms
    with pytest.raises(Absent, match="no rollout 'web'"):
        await rollouts.delete("web")
    with pytest.raises(Absent, match="no rollout 'web'"):
        await rollouts.status("web")


async def test_who_may_not_list_the_pods_is_informed_before_anything_is_deleted() -> None:
    class Hidden(MemoryRollouts):
        async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
            if kind is LAUNCHERS:
                raise Denied("list", "pods", 'User "ada" cannot list resource "pods"')
            return await super().read_all(kind, selector)

    cluster = Hidden()
    rollouts = rollouts_of(cluster)
    await cluster.apply_vm({**vm(), "metadata": {"name": "web-01", "labels": {ROLLOUT_LABEL: "web"}}})
    for look in (rollouts.count_vms, rollouts.delete):
        with pytest.raises(Denied):
            await look("web")
    assert [one.name for one in cluster.vms] == ["web-01"]


async def test_a_vm_of_another_client_is_refused_before_anything_is_made() -> None:
    cluster = MemoryRollouts()
    foreign = {**vm(), "metadata": {"name": "web-04", "labels": {}}}
    await cluster.apply_vm(foreign)
    cluster.applied.clear()
    with pytest.raises(Refused, match=r"1 VM of these names .* web-04; choose another name"):
        await created(cluster)
    assert cluster.applied == []
    assert cluster.documents == {}


async def test_a_vm_that_appears_meanwhile_is_left_alone() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    prepared = await rollouts.prepare(rollout())
    foreign = {**vm(), "metadata": {"name": "web-04", "labels": {}}}
    await cluster.apply_vm(foreign)
    async with moving(cluster):
        report = await rollouts.create(prepared)
    (failed,) = report.failed
    assert failed.name == "web-04"
    assert "another client has written it" in failed.reason
    assert cluster.manifests["web-04"] == foreign


async def test_a_deletion_spares_a_vm_that_was_made_again() -> None:
    cluster = MemoryRollouts()
    async with moving(cluster):
        await created(cluster)
    with pytest.raises(Conflict):
        await cluster.delete_vm("VirtualMachine", NAMESPACE, "web-01", "another")


async def test_the_forecast_names_nodes_and_vms_that_are_left_to_others() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    prepared = await rollouts.prepare(rollout(template=vm(cores=20)))
    assert dict(prepared.forecast.by_node) == {(await one_server()).nodes[0].name: 3}
    first, second = prepared.forecast.summary
    assert first == "3 VMs will get cores on 1 node, as of now"
    assert second.startswith("web-04 and 2 more will not fit: 1 node: ")


async def test_the_forecast_sends_the_vms_of_each_template_where_that_may_go() -> None:
    async def nodes() -> PlanningCluster:
        (node,) = (await one_server()).nodes
        tainted = {
            "metadata": {"name": node.name, "labels": {"kubevirt.io/schedulable": "true"}},
            "spec": {"taints": [{"key": "dedicated", "value": "db", "effect": "NoSchedule"}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        return PlanningCluster((node,), {node.name: msgspec.convert(tainted, SchedulableNode)})

    web, db = vmi(), vmi()
    db["spec"]["tolerations"] = [{"key": "dedicated", "operator": "Exists"}]
    entries = [{"template": web, "count": 2, "name": "web"}, {"template": db, "count": 3, "name": "db"}]
    asked = read_rollout({"name": "both", "vms": entries}, NAMESPACE)
    prepared = await Rollouts(MemoryRollouts(), NAMESPACE, nodes, everywhere).prepare(asked)
    assert sorted(prepared.forecast.nodes) == ["db-01", "db-02", "db-03"]
    why = "does not fit: 1 node: the taint dedicated=db:NoSchedule is not tolerated"
    assert prepared.forecast.left_out == {"web-01": why, "web-02": why}
