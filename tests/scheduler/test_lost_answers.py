"""Binds whose answers are lost, come late, or meet a machine that has changed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.scalars import CpuMask
from kvplace.kube.watches import PODS, TOPOLOGIES
from kvplace.scheduler.extender import ExtenderSettings
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.nodes.machines import EIGHT, TWO
from tests.scheduler.counting import Counting


@pytest.fixture
def cluster() -> Counting:
    """Two nodes of eight CPUs."""
    made = Counting()
    for name in ("a", "b"):
        made.create_node(name, topology=EIGHT)
    return made


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("operation", [Operation.BIND, Operation.WRITE_LEDGER])
async def test_a_write_without_an_answer_is_found_out_and_the_bind_succeeds(
    cluster: Counting, operation: Operation, moment: Moment
) -> None:
    async with replica(cluster, controller=False) as one:
        cluster.faults.fail(operation, Unavailable("timeout"), moment=moment)
        pod = asking_pod(cluster, "vm", 2)
        assert await one.bind(pod, "a") == ""
        assert cluster.placement("vm").placement.cpus == cluster.ledger("a").claims[pod.uid].cpus == 0b11
        assert cluster.ledger("a").owned == 0b11


async def test_while_it_is_unknown_whether_the_pod_is_bound_its_claim_stays(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        cluster.faults.fail(Operation.BIND, Unavailable("timeout"), moment=Moment.AFTER)
        cluster.faults.fail(Operation.READ_POD, Unavailable("timeout"))
        pod = asking_pod(cluster, "vm", 2)
        await one.filter(pod)
        cluster.pause_watches(PODS)
        assert await one.bind(pod, "a") == "timeout"
        assert cluster.pod("vm").node == "a"
        assert cluster.claimed_on(pod.uid) == ["a"]
        assert await one.bind(pod, "a") == ""
        cluster.resume_watches(PODS)


async def test_a_bind_that_took_too_long_before_its_binding_does_not_bind_late(cluster: Counting) -> None:
    """By then the claim may be on its way back: a bind that slept must not use it."""
    async with replica(cluster, controller=False) as one:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER, moment=Moment.AFTER)
        pod = asking_pod(cluster, "vm", 2)
        binding = asyncio.create_task(one.bind(pod, "a"))
        await hold.reached.wait()
        await asyncio.sleep(ExtenderSettings().bind_seconds + 1.0)
        hold.release()
        assert "took too long" in await binding
        assert cluster.bindings == []
        assert await one.bind(pod, "a") == ""


# Machines that change under a claim.


async def test_a_bound_pod_keeps_its_claim_when_its_machine_has_changed_and_bind_comes_again(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        cluster.put_topology("a", TWO)
        await one.until(lambda: one.topology("a") == TWO)
        pod = asking_pod(cluster, "vm", 8)
        cluster.pause_watches(PODS)
        assert await one.bind(pod, "a") == ""
        for machine in (replace(TWO, reserved=CpuMask(0b11)), EIGHT):  # EIGHT lacks half of the CPUs
            cluster.put_topology("a", machine)
            await one.until(lambda machine=machine: one.topology("a") == machine)
            assert await one.bind(pod, "a") == ""
        assert cluster.claimed_on(pod.uid) == ["a"]
        cluster.resume_watches(PODS)


async def test_a_claim_that_its_machine_no_longer_serves_is_left_to_the_controller(cluster: Counting) -> None:
    cluster.create_node("two", topology=TWO)
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 8)
        cluster.faults.fail(Operation.BIND, Unavailable("timeout"), times=50)
        assert await one.bind(pod, "two") == "timeout"
        cluster.faults._faults.clear()
        cluster.put_topology("two", EIGHT)
        await one.until(lambda: one.topology("two") == EIGHT)
        assert "have changed since its cores were claimed" in await one.bind(pod, "two")
        assert cluster.claimed_on(pod.uid) == ["two"]
        assert (await one.filter(pod)).names == ["a"]
        assert await one.bind(pod, "a") == ""


async def test_the_placement_on_the_pod_is_of_the_machine_that_was_decided_on(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        hold = cluster.faults.hold(Operation.CREATE_LEDGER)
        pod = asking_pod(cluster, "vm", 8)
        binding = asyncio.create_task(one.bind(pod, "a"))
        await hold.reached.wait()
        cluster.put_topology("a", TWO)
        await one.until(lambda: one.topology("a") == TWO)
        assert not cluster._logs[TOPOLOGIES]._paused
        hold.release()
        assert await binding == ""
        placement = cluster.placement("vm")
        assert placement.topology == TWO.fingerprint
        assert placement.placement.vcpus == (0, 8, 1, 9, 2, 10, 3, 11)
