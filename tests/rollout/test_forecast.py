"""A rollout foretells which VMs are not planned and why, and likely typos of their template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest

from kvplace.core.errors import Absent, Forbidden, Refused
from kvplace.kube.api_rollouts import Quota
from tests.rollout.examples import rollout, rollouts_of, vm
from tests.rollout.memory_rollouts import MemoryRollouts


async def test_who_wants_no_plan_is_informed_that_there_is_none() -> None:
    prepared = await rollouts_of(MemoryRollouts()).prepare(rollout(), plan=False)
    assert prepared.forecast.summary == ("6 VMs not planned: planning was left out",)


async def test_an_annotation_that_was_likely_meant_otherwise_is_named_with_the_right_one() -> None:
    template = vm(annotations={"cpu_set": "one-numa", "example.com/cpu": "fast"})
    prepared = await rollouts_of(MemoryRollouts()).prepare(rollout(template=template))
    assert prepared.forecast.summary == (
        "annotation cpu_set of the template of web-01 has no effect: did you mean cpu-set?",
        "6 VMs not planned: without a request for cores of known size",
    )


async def test_a_rollout_of_nearly_that_name_is_suggested() -> None:
    rollouts = rollouts_of(MemoryRollouts())
    await rollouts.begin(await rollouts.prepare(rollout()))
    with pytest.raises(Absent, match="has no rollout 'wep'; did you mean 'web'"):
        await rollouts.status("wep")
    with pytest.raises(Absent, match="has no rollout 'wep' and no VMs of one; did you mean 'web'"):
        await rollouts.delete("wep")
    with pytest.raises(Absent, match="no rollout 'database'; `kvplace rollout list -n default` names them"):
        await rollouts.status("database")


async def test_who_may_not_read_quotas_is_informed_that_they_are_not_checked() -> None:
    class WithoutTheRight(MemoryRollouts):
        async def read_quotas(self, namespace: str) -> tuple[Quota, ...]:
            raise Forbidden("you may not")

    prepared = await rollouts_of(WithoutTheRight()).prepare(rollout(2))
    unchecked, planned = prepared.forecast.summary
    assert unchecked.startswith("you may not list the resourcequotas of namespace ")
    assert planned.startswith("2 VMs will get cores")


GIB = 1 << 30


def quota(**limits: int) -> Quota:
    return Quota("small", {key.replace("_", "."): Fraction(left) for key, left in limits.items()}, {})


async def prepared(template: Mapping[str, Any], found: Quota, **keys: Any) -> None:
    cluster = MemoryRollouts()
    cluster.quotas = (found,)
    await rollouts_of(cluster).prepare(rollout(template=dict(template), **keys), plan=False)


def in_huge_pages(template: dict[str, Any]) -> None:
    template["spec"]["template"]["spec"]["domain"]["memory"]["hugepages"] = {"pageSize": "2Mi"}


def overcommitted(template: dict[str, Any]) -> None:
    template["spec"]["template"]["spec"]["domain"]["resources"] = {"requests": {"memory": "256Mi"}}


def unchanged(template: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize("until", ["created", "pinned"])
async def test_vms_that_are_started_need_a_pod_each(until: str) -> None:
    with pytest.raises(Refused, match="quota small has 5 of pods left, and the VMs need 6"):
        await prepared(vm(), quota(pods=5), until=until)


@pytest.mark.parametrize("until", ["created", "pinned"])
async def test_vms_that_stay_off_need_no_pods_and_no_memory(until: str) -> None:
    off = quota(pods=0, requests_memory=0, memory=0)
    await prepared(vm(run="Halted"), off, until=until)
    several = Quota("small", {"count/virtualmachines.kubevirt.io": Fraction(5)}, {})
    with pytest.raises(Refused, match=r"has 5 of count/virtualmachines\.kubevirt\.io left"):
        await prepared(vm(run="Halted"), several, until=until)


@pytest.mark.parametrize(
    ("change", "fits", "needs"),
    [
        (unchanged, 6 * GIB, "6Gi"),
        (overcommitted, 3 * GIB // 2, "1536Mi"),
        (in_huge_pages, 0, ""),
    ],
)
@pytest.mark.parametrize("resource", ["requests_memory", "memory"])
async def test_memory_counts_as_the_pods_request_it(
    change: Callable[[dict[str, Any]], None], fits: int, needs: str, resource: str
) -> None:
    template = vm()
    change(template)
    await prepared(template, quota(**{resource: fits}))
    if needs:
        with pytest.raises(Refused, match=f"and the VMs need {needs}"):
            await prepared(template, quota(**{resource: fits - 1}))
