"""VMs that a policy refuses by their names fail alone; a refused template is reported first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvplace.core.errors import ExitCode, Forbidden, KvplaceError, Misconfigured
from kvplace.kube.api_errors import Denied, Rejected
from kvplace.kube.reported_vms import ReportedVm
from kvplace.rollout.report import Failure, by_reason, report_of
from kvplace.rollout.tracker import Tracker
from tests.rollout.examples import moving, rollout, rollouts_of
from tests.rollout.memory_rollouts import NAMESPACE, MemoryRollouts

NAMES = [f"web-{number:02}" for number in range(1, 7)]
BY_POLICY = Rejected("ValidatingAdmissionPolicy 'no-three' denied request")
BY_WEBHOOK = Denied("patch", "virtualmachines", 'admission webhook "v.example.org" denied the request')


class Strict(MemoryRollouts):
    """An API server whose policy refuses some names."""

    def __init__(self, refuses: Callable[[str], bool], error: KvplaceError) -> None:
        super().__init__()
        self.refuses = refuses
        self._error = error

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        if self.refuses(vm["metadata"]["name"]):
            raise self._error
        await super().apply_vm(vm, dry_run=dry_run)


@pytest.mark.parametrize("error", [BY_POLICY, BY_WEBHOOK])
@pytest.mark.parametrize("refused", ["web-01", "web-03", "web-06"])
async def test_single_names_that_are_refused_fail_and_a_resumed_run_states_the_same(
    error: KvplaceError, refused: str
) -> None:
    cluster = Strict(lambda name: name == refused, error)
    rollouts = rollouts_of(cluster)
    async with moving(cluster):
        first = await rollouts.create(await rollouts.prepare(rollout()))
        again = await rollouts.create(await rollouts.prepare(await rollouts.stored("web")))
        for report in (first, again):
            assert [(one.name, one.reason) for one in report.failed] == [(refused, str(error))]
            assert report.exit_code is ExitCode.PARTLY_DONE
        assert cluster.applied == [name for name in NAMES if name != refused]
        cluster.refuses = lambda name: False
        last = await rollouts.create(await rollouts.prepare(await rollouts.stored("web")))
    assert last.exit_code is ExitCode.DONE


@pytest.mark.parametrize(("error", "raised"), [(BY_POLICY, Misconfigured), (BY_WEBHOOK, Forbidden)])
async def test_a_template_that_is_refused_under_any_name_is_reported_before_anything_is_made(
    error: KvplaceError, raised: type[KvplaceError]
) -> None:
    cluster = Strict(lambda name: True, error)
    with pytest.raises(raised, match="denied"):
        await rollouts_of(cluster).prepare(rollout())
    assert cluster.documents == {}


async def test_a_template_that_a_webhook_does_not_let_try_is_made_all_the_same() -> None:
    class Real(MemoryRollouts):
        async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
            if dry_run:
                raise Rejected('admission webhook "v.example.org" does not support dry run')
            await super().apply_vm(vm)

    cluster = Real()
    rollouts = rollouts_of(cluster)
    prepared = await rollouts.prepare(rollout(), plan=False)
    said = 'admission webhook "v.example.org" does not support dry run'
    assert prepared.forecast.summary[0] == f"the template of web-01 could not be tried: {said}"
    async with moving(cluster):
        report = await rollouts.create(prepared)
    assert report.exit_code is ExitCode.DONE


def test_reasons_that_differ_only_in_names_are_reported_once() -> None:
    refused = 'pods "virt-launcher-%s" is forbidden: not on Mondays'
    alike = [
        Failure(name, refused % f"{name}-{end}") for name, end in (("web-03", "mt29r"), ("web-13", "cmvhl"))
    ]
    other = Failure("web-04", "no such image")
    assert [list(group) for group in by_reason([alike[0], other, alike[1]])] == [alike, [other]]


def test_a_vm_that_is_being_deleted_counts_as_failed_and_not_also_as_there() -> None:
    tracker = Tracker(rollout(2, until="created"))
    for name, deleting in (("web-01", False), ("web-02", True)):
        tracker.vm_changed(None, ReportedVm(NAMESPACE, name, rollout="web", deleting=deleting))
    report = report_of("web", NAMESPACE, tracker.vms.values(), {})
    assert (report.ready, [one.name for one in report.failed]) == (("web-01",), ["web-02"])
    assert (report.counts.ready, report.counts.failed) == (1, 1)
