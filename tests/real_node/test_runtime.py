"""Pods and containers in a sandbox, made without a kubelet."""

from __future__ import annotations

from harness.node_programs.small_images import busybox
from harness.real_node.runtime import ContainerRuntime

FOR_EVER = ["sleep", "inf"]


def test_a_container_runs_on_the_cpus_it_was_made_with_and_then_on_those_it_is_given(
    container_runtime: ContainerRuntime,
) -> None:
    pod = container_runtime.run_pod("pinned", annotations={"example.org/note": "seen"})
    container = pod.run_container("main", FOR_EVER, image=busybox().reference, cpuset_cpus="0")
    assert container.cpuset() == "0"
    assert container.run("taskset", "-p", "1").strip() == "pid 1's current affinity mask: 1"

    container.update("--cpuset-cpus=1")
    assert container.cpuset() == "1"
    pod.remove()
    assert container_runtime.crictl("pods", "--quiet") == ""


def test_containers_outlive_a_killed_containerd(container_runtime: ContainerRuntime) -> None:
    pod = container_runtime.run_pod("survivor")
    container = pod.run_container("main", FOR_EVER, image=busybox().reference)
    pid = container.pid

    container_runtime.server.kill()
    container_runtime.start()

    assert container.pid == pid
    assert container.run("echo", "alive") == "alive\n"
    pod.remove()
