"""A rollout foretells which VMs are not planned and why, and likely typos of their template."""

from __future__ import annotations

import pytest

from kvplace.core.errors import Absent, Forbidden
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
