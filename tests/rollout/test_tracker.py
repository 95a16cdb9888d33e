"""Which VMs are made next, and which pod of a VM counts."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.vm_stages import VmStage
from kvplace.core.well_known_names import PINNED
from kvplace.kube.reported_vms import LAUNCHER_READER, LauncherPod, ReportedVm
from kvplace.rollout.tracker import MakingState, due, observe, wave_ends

TO_MAKE, UNDER_WAY, READY, FAILED = MakingState


def test_the_remainder_forms_the_last_wave() -> None:
    assert wave_ends([1, "10%"], 500) == (1, 51, 500)
    assert wave_ends([], 7) == (7,)
    assert wave_ends([100], 7) == (7,)
    assert wave_ends(["1%"], 7) == (1, 7)
    assert wave_ends([1], 0) == (0,)


def test_a_wave_begins_when_all_vms_before_it_are_there_or_have_failed() -> None:
    ends = wave_ends([2], 4)
    assert list(due([TO_MAKE] * 4, ends, 10)) == [0, 1]
    assert list(due([READY, UNDER_WAY, TO_MAKE, TO_MAKE], ends, 10)) == []
    assert list(due([READY, FAILED, TO_MAKE, TO_MAKE], ends, 10)) == [2, 3]


def test_nothing_more_is_made_after_too_many_failures() -> None:
    statuses = [FAILED, FAILED, TO_MAKE]
    assert list(due(statuses, (3,), 10, max_failures=3)) == [2]
    assert list(due(statuses, (3,), 10, max_failures=2)) == []


@given(
    st.lists(st.sampled_from(MakingState), max_size=30),
    st.lists(st.one_of(st.integers(1, 12), st.sampled_from(["1%", "30%", "100%"])), max_size=4),
    st.integers(1, 12),
)
def test_never_more_than_allowed_are_under_way_and_no_vm_is_made_twice(
    statuses: list[MakingState], sizes: list[int | str], most: int
) -> None:
    ends = wave_ends(sizes, len(statuses))
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(statuses)
    made = list(due(statuses, ends, most))
    assert all(statuses[number] is TO_MAKE for number in made)
    assert len(set(made)) == len(made)
    assert not made or len(made) + statuses.count(UNDER_WAY) <= most
    if TO_MAKE in statuses and UNDER_WAY not in statuses:
        assert made, "with nothing under way the rollout goes on"
    for number in made:
        before = next((end for end in reversed((0, *ends)) if end <= number), 0)
        assert all(status.is_settled for status in statuses[:before])


def test_while_a_migration_ends_the_pod_of_the_running_qemu_counts_and_not_the_one_that_has_ended() -> None:
    vmi = ReportedVm("team", "web", status="Running", running_since=1.0)
    source = launcher("source", {"state": {"terminated": {"exitCode": 0}}}, pinned="True")
    target = launcher("target", {"state": {"running": {}}}, pinned="False")
    for pods in ((source, target), (target, source)):
        observed = observe("VirtualMachineInstance", vmi, vmi, pods)
        assert (observed.node, observed.stage) == ("node-of-target", VmStage.RUNNING)
        assert observed.measured == (None, "measured on target")


def launcher(name: str, compute: dict[str, Any], *, pinned: str) -> LauncherPod:
    """A pod of a VM as the API server writes it; the sidecar of the ended one has not ended yet."""
    owner = {
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "web", "controller": True
    }  # fmt: skip
    document = {
        "metadata": {"name": name, "namespace": "team", "uid": name, "ownerReferences": [owner]},
        "spec": {"nodeName": f"node-of-{name}"},
        "status": {
            "phase": "Running",
            "conditions": [{"type": PINNED, "status": pinned, "message": f"measured on {name}"}],
            "containerStatuses": [{"name": "compute", **compute}, {"name": "hook", "state": {"running": {}}}],
        },
    }
    return LAUNCHER_READER.record(msgspec.Raw(msgspec.json.encode(document)))
