"""Which pods the guard checks, and what it wants of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvplace.agent.claims_here import ClaimsHere
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.containers import Container
from kvplace.agent.cpusets import ClaimRefusal, Cpusets, CpuSetting
from kvplace.agent.own_node import OwnNode
from kvplace.agent.pinning_sweep import PinningSweep
from kvplace.agent.relocation import Relocations
from kvplace.agent.watched_pod import ClaimContainer
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import ContainerId, CpuId, NodeName, PodUid
from kvplace.kube.records import PodRecord
from kvplace.kube.watches import Apply, Delete
from kvplace.linux.kernel_files import Gone
from tests.nodes.machines import EIGHT

NODE = NodeName("worker-1")
VM, PLAIN, ALIEN = PodUid("vm"), PodUid("plain"), PodUid("alien")
CPUS = parse_cpu_list("2-3")


@dataclass
class Enforced:
    """Containers as the enforcing component knows them."""

    known: tuple[Container, ...]
    decided: Cpusets
    without_cgroup: frozenset[str] = frozenset()
    mounted: Path = Path("/sys/fs/cgroup")

    def containers(self) -> Iterable[Container]:
        return list(self.known)

    def cpusets(self) -> Cpusets:
        return self.decided

    def cgroup_of(self, container: ContainerId) -> Path:
        if container in self.without_cgroup:
            raise Gone(container)
        return self.mounted / container


def placed(uid: PodUid, revision: int = 1) -> PodPlacement:
    placement = Placement(Policy.EXCLUSIVE, (CpuId(2), CpuId(3)), CPUS, owned=CPUS)
    return PodPlacement(uid, NODE, "", OnFailure.WAIT, placement, revision=revision)


def container(name: str, uid: PodUid, *, in_vm_pod: bool = True, placement: str = "") -> Container:
    return Container(ContainerId(f"{uid}-{name}"), name, uid, "vms", f"pod-{uid}", in_vm_pod, placement)


COMPUTE, SIDECAR = container("compute", VM), container("hook-sidecar-0", VM)
APP, LOG = container("app", PLAIN, in_vm_pod=False), container("log", PLAIN, in_vm_pod=False)


def node(*pods: PodPlacement) -> OwnNode:
    own = OwnNode(NODE, EIGHT)
    for bound in pods:
        uid = bound.pod_uid
        record = PodRecord("vms", f"pod-{uid}", uid, node=NODE, phase="Running", placement=bound.to_json())
        own.pods.apply(Apply(record))
    return own


def decided(*containers: Container) -> Cpusets:
    return Cpusets(parse_cpu_list("0-1,4-7"), {one.id: CpuSetting(CPUS) for one in containers}, {})


def test_containers_that_run_a_claim_are_listed_by_pod_and_others_are_not() -> None:
    enforced = Enforced((COMPUTE, SIDECAR, LOG, APP, container("app", ALIEN)), decided(COMPUTE, APP, LOG))
    own = node(placed(VM), placed(PLAIN))
    claims = ClaimsHere(own, enforced, Relocations(own)).now()
    assert set(claims) == {VM, PLAIN}
    vm, plain = claims[VM].target, claims[PLAIN].target
    assert vm.containers == (ClaimContainer("compute", Path("/sys/fs/cgroup/vm-compute")),)
    assert [one.name for one in plain.containers] == ["app", "log"]
    assert (vm.wanted.vm, plain.wanted.vm) == (True, False)
    assert (vm.wanted.cpuset, vm.wanted.online) == (CPUS, EIGHT.cpus)
    assert (vm.sets_threads, vm.refusal, claims[VM].pod) == (True, None, "pod-vm")


def test_nothing_is_made_anew_until_something_changes() -> None:
    enforced = Enforced((COMPUTE,), decided(COMPUTE))
    own = node(placed(VM))
    here = ClaimsHere(own, enforced, Relocations(own))
    first = here.now()
    assert here.now() is first
    own.confirm(VM, 1)
    confirmed = here.now()
    assert (confirmed[VM].confirmed, confirmed[VM].settled) == (1, False)
    enforced.decided = replace(enforced.decided, confirmed={VM: 1})
    assert here.now()[VM].settled
    own.pods.apply(Apply(replace(own.pods.records[VM], placement=placed(VM, 2).to_json())))
    assert (here.now()[VM].placement.revision, here.now()[VM].settled) == (2, False)


def test_a_container_that_has_not_started_is_known_and_gets_its_cgroup_later() -> None:
    enforced = Enforced((COMPUTE,), decided(COMPUTE), without_cgroup=frozenset({COMPUTE.id}))
    own = node(placed(VM))
    here = ClaimsHere(own, enforced, Relocations(own))
    assert here.now()[VM].target.containers == ()
    enforced.without_cgroup = frozenset()
    assert len(here.now()[VM].target.containers) == 1


def test_a_pod_that_the_watch_does_not_have_yet_is_known_by_what_its_sandbox_was_made_with() -> None:
    compute = replace(COMPUTE, placement=placed(VM).to_json())
    own = node()
    claims = ClaimsHere(own, Enforced((compute,), decided(compute)), Relocations(own)).now()
    assert claims[VM].placement == placed(VM)


def test_a_vm_that_has_moved_does_not_go_back_when_its_pod_is_deleted_by_force() -> None:
    """Its sandbox has the placement that it was made with for ever."""
    compute = replace(COMPUTE, placement=placed(VM).to_json())
    own = node(placed(VM, revision=2))
    here = ClaimsHere(own, Enforced((compute,), decided(compute)), Relocations(own))
    assert here.now()[VM].placement.revision == 2
    own.pods.apply(Delete(own.pods.records[VM]))
    assert here.now()[VM].placement.revision == 2


def test_what_is_refused_or_only_observed_is_reported_and_not_set() -> None:
    refusal = ClaimRefusal(PinnedReason.CPUS_IN_USE, "CPU 2 is in use.")
    enforced = Enforced((COMPUTE,), Cpusets(CPUS, {}, {VM: refusal}))
    own = node(placed(VM))
    target = ClaimsHere(own, enforced, Relocations(own)).now()[VM].target
    assert (target.refusal, target.sets_threads, target.wanted.cpuset) == (refusal, False, 0)


def test_every_container_of_a_plain_pod_is_checked_although_only_their_cgroups_are_known(
    tmp_path: Path,
) -> None:
    """Cgroups have no names of containers; that of the pause container must not hide the others."""
    ids = ["a" * 64, "b" * 64]
    pause, app = (Container(ContainerId(id_), "", PLAIN, "vms", "pod", in_vm_pod=False) for id_ in ids)
    for one, cpus in (pause, "2-3"), (app, "0-7"):
        (tmp_path / one.id).mkdir()
        (tmp_path / one.id / "cpuset.cpus.effective").write_text(f"{cpus}\n")
    own = node(placed(PLAIN))
    enforced = Enforced((pause, app), decided(pause, app), mounted=tmp_path)
    claims = ClaimsHere(own, enforced, Relocations(own)).now()
    sweep = PinningSweep(tmp_path)
    finding = sweep.look([claims[PLAIN].target])[PLAIN]
    sweep.close()
    (found,) = finding.differences
    assert str(found) == f"the cpuset of container {app.id[:13]} is CPU 0-7, wider than 2-3"
