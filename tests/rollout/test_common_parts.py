"""Disks, addresses and ids that a template would give to all of its VMs are named before any is made."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.core.errors import Misconfigured
from tests.rollout.examples import rollout, rollouts_of, vm, vmi
from tests.rollout.memory_rollouts import MemoryRollouts

Json = dict[str, Any]
UUID = "5d307ca9-b3ef-428c-8861-06e72d69f223"


def filled(spec: Json) -> None:
    """Give a VMI's spec what a VM has that was read from a cluster."""
    spec["domain"]["devices"] = {
        "disks": [{"name": "data", "disk": {}}, {"name": "iso", "cdrom": {}}],
        "interfaces": [{"name": "default", "macAddress": "02:00:00:00:00:01"}, {"name": "other"}],
    }
    spec["domain"]["firmware"] = {"uuid": UUID, "bootloader": None}
    spec["volumes"] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "db"}},
        {"name": "more", "dataVolume": {"name": "more"}},
        {"name": "iso", "persistentVolumeClaim": {"claimName": "iso"}},
        {"name": "shown", "persistentVolumeClaim": {"claimName": "shown", "readOnly": True}},
        {"name": "root", "containerDisk": {"image": "fedora"}},
    ]


def of_vm() -> Json:
    template = vm()
    filled(template["spec"]["template"]["spec"])
    return template


def of_vmi() -> Json:
    template = vmi()
    filled(template["spec"])
    return template


@pytest.mark.parametrize("template", [of_vm(), of_vmi()])
async def test_parts_that_all_vms_would_share_are_named_unless_there_is_only_one_vm(template: Json) -> None:
    rollouts = rollouts_of(MemoryRollouts())
    prepared = await rollouts.prepare(rollout(template=template), plan=False)
    *common, _ = prepared.forecast.summary
    assert common == [
        f"all 6 VMs of the template of web-01 have the same {part}"
        for part in (
            "PersistentVolumeClaim db",
            "DataVolume more",
            "MAC address 02:00:00:00:00:01",
            f"firmware UUID {UUID}",
        )
    ]
    alone = await rollouts.prepare(rollout(1, template=template), plan=False)
    assert alone.forecast.summary == ("1 VM not planned: planning was left out",)


async def test_vms_that_would_use_the_disk_of_one_of_them_are_refused() -> None:
    template = vm()
    template["spec"]["dataVolumeTemplates"] = [{"metadata": {"name": "root"}, "spec": {}}]
    rollouts = rollouts_of(MemoryRollouts())
    with pytest.raises(
        Misconfigured, match=r"all 6 VMs of the template of web-01 .* DataVolume root of spec"
    ):
        await rollouts.prepare(rollout(template=template))
    assert (await rollouts.prepare(rollout(1, template=template))).missing


@pytest.mark.parametrize("volumes", [None, 1, [None], [{"name": 1}]])
async def test_fields_of_another_shape_are_left_to_the_api_server(volumes: object) -> None:
    template = vm()
    template["spec"]["template"]["spec"]["volumes"] = volumes
    template["spec"]["dataVolumeTemplates"] = volumes
    prepared = await rollouts_of(MemoryRollouts()).prepare(rollout(template=template), plan=False)
    assert len(prepared.forecast.summary) == 1
