"""Nodes shared with others: a second kube-scheduler, plain pods, the kubelet's static policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from harness.control_plane.cluster import MERGE_PATCH
from harness.control_plane.kubelet_admission import cpu_request, has_ended
from harness.faults.script import EVENT, Delay, Rule
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.scalars import CpuId, CpuMask
from tests.faults.faulty_cluster import Outcome, Scene
from tests.faults.observer import Json, observing, owned_cpus
from tests.faults.scenario import OwnStory

MAIN = "main-scheduler"


def _plain_pod(name: str) -> Json:
    size = {"cpu": "1", "memory": "64Mi"}
    container = {"name": "work", "image": "work.test/work", "resources": {"requests": size, "limits": size}}
    return {"metadata": {"name": name}, "spec": {"containers": [container]}}


@contextlib.contextmanager
def _other_namespace(on: Scene) -> Iterator[str]:
    name = on.plane.create_namespace(f"{on.namespace}-plain")
    try:
        yield name
    finally:
        on.plane.remove_namespace(name)


def _two_schedulers(on: Scene, outcome: Outcome) -> None:
    """The main scheduler with our extender and kvplace's own one fill the same nodes at the same moment.

    They do not know what the other one is about to bind. Cores never have two owners; where their CPU
    requests come to more than a node has, the kubelet rejects pods, and what these claimed is released.
    """
    stage, asking, plain = on.stage, 40, 40
    outcome.pods = asking + plain
    with stage.second_replica(), _other_namespace(on) as namespace, observing(on.plane, namespace) as others:
        stage.extender.cut_all()
        main = stage.installation.add_scheduler(
            stage.extender.url, names=("default-scheduler", MAIN), ca_file=stage.extender_ca
        )
        try:
            with main.process.paused(), stage.scheduler.process.paused():
                with on.burst(asking // 2):
                    pass
                with on.burst(asking // 2, scheduler=MAIN):
                    pass
                path = f"/api/v1/namespaces/{namespace}/pods"
                with ThreadPoolExecutor(8) as pool:
                    names = [f"plain-{number}" for number in range(plain)]
                    list(pool.map(lambda name: on.plane.request("POST", path, _plain_pod(name)), names))
            on.fault_is_over()
            for observer in (on.observer, others):
                settled = observer.wait_until(observer.all_are_settled, "that all are bound or state why not")
                outcome.bound_s = max(outcome.bound_s or 0.0, on.after_fault(settled))
                observer.wait_until(observer.kubelets_have_answered, "that kubelets have answered")
            outcome.agree_s = on.after_fault(on.wait_until_agreed())
            for node, machine in on.nodes.items():
                running = [
                    pod
                    for pod in [*on.observer.all, *others.all]
                    if pod["spec"].get("nodeName") == node and not has_ended(pod)
                ]
                used = sum(cpu_request(pod) for pod in running)
                assert used <= machine.allocatable.bit_count() * 1000, (node, used)
        finally:
            main.stop()


def _kubelets_cpus(on: Scene, outcome: Outcome) -> None:
    """CPUs of the kubelet's static policy change while pods are placed.

    None of them is given out. One that the kubelet takes although a pod owns it is reported on that pod.
    """
    outcome.pods = 40
    _kubelets_hold(on, dict.fromkeys(on.nodes, mask_of(range(1, 5))))
    first = _burst_outside(on, 10, dict.fromkeys(on.nodes, mask_of(range(1, 5))))
    taken = {}
    for node, machine in on.nodes.items():
        free = [cpu for cpu in cpus_of(machine.allocatable) if str(cpu) not in on.ledger(node)["owners"]]
        taken[node] = mask_of(free[-12:])
    _kubelets_hold(on, taken)
    _burst_outside(on, 10, taken)
    # Nothing is left for more: what waits is bound when the kubelets give back.
    everything = {node: machine.allocatable & ~_owned(on, node) for node, machine in on.nodes.items()}
    _kubelets_hold(on, everything)
    with on.burst(20):
        pass
    on.observer.wait_until(on.observer.all_are_settled, "that pods without a node report why")
    on.wait_until_agreed()
    assert len(on.observer.bound) == 20
    _kubelets_hold(on, dict.fromkeys(on.nodes, 0))
    on.fault_is_over()
    outcome.bound_s = on.after_fault(on.observer.wait_until_bound(40))
    outcome.agree_s = on.after_fault(on.wait_until_agreed())

    node, cpu = min(owned_cpus(first))
    _kubelets_hold(on, {node: 1 << cpu})
    on.observer.wait_until(
        lambda: any(_says_that_it_lost(event, first, cpu) for event in on.observer.events.values()),
        "that the pod's loss is reported",
    )
    on.check()


def _burst_outside(on: Scene, count: int, forbidden: Mapping[str, int]) -> Json:
    """Bind some more pods, none of them to a forbidden CPU; returns one of them."""
    before = {pod["metadata"]["uid"] for pod in on.observer.bound}
    with on.burst(count):
        pass
    on.observer.wait_until_bound(len(before) + count)
    new = [pod for pod in on.observer.bound if pod["metadata"]["uid"] not in before]
    assert [place for pod in new for place in owned_cpus(pod) if forbidden[place[0]] >> place[1] & 1] == []
    return new[0]


def _kubelets_hold(on: Scene, cpus: Mapping[str, int]) -> None:
    """State what agents report about their kubelets, and wait until `serve` knows."""
    script = on.stage.proxy.script
    for node, mask in cpus.items():
        path = f"/apis/kvplace.io/v1alpha1/nodetopologies/{node}"
        listed = format_cpu_list(CpuMask(mask))
        if on.plane.request("GET", path).get("status", {}).get("kubeletCpus") == listed:
            continue  # no watch would show it
        script.play([Rule(EVENT, "nodetopologies", Delay(0))])
        status = {"status": {"kubeletCpus": listed}}
        on.plane.request("PATCH", f"{path}/status", status, content_type=MERGE_PATCH)
        script.wait_until_played()


def _owned(on: Scene, node: str) -> int:
    return mask_of(CpuId(int(cpu)) for cpu in on.ledger(node)["owners"])


def _says_that_it_lost(event: Json, pod: Json, cpu: int) -> bool:
    return (
        event["reason"] == "CoresOverlap"
        and event["regarding"]["name"] == pod["metadata"]["name"]
        and f"has allocated CPUs {cpu}," in event["note"]
    )


SHARING: tuple[OwnStory, ...] = (
    OwnStory(
        "two-schedulers",
        "two schedulers, two replicas, plain pods on the same nodes",
        _two_schedulers,
        kubelets=True,
        quick=True,
    ),
    OwnStory(
        "kubelets-cpus", "the kubelets' static policy takes and gives back CPUs", _kubelets_cpus, quick=True
    ),
)
