"""A shell completes the names of nodes and VMs from the real API server, and prints nothing without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from kvplace.cli import cluster_flags
from kvplace.cli.completion_command import completions
from kvplace.cli.main import cli
from kvplace.core.well_known_names import ROLLOUT_LABEL
from tests.cli.live_cluster.small_cluster import SmallCluster


def offered(*words: str) -> list[str]:
    *before, begun = words
    return [item.value for item in completions(ShellComplete(cli, {}, "kvplace", ""), before, begun)]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as a busy machine needs; a user who types would not."""
    monkeypatch.setattr(cluster_flags, "_LONGEST_WAIT_S", 60.0)


def test_names_of_nodes_and_vms_are_offered(cluster: SmallCluster) -> None:
    flags = ("--kubeconfig", str(cluster.plane.kubeconfig), "-n", cluster.namespace)
    assert {cluster.first, cluster.second, cluster.bare} <= set(offered("get", "nodes", *flags, ""))
    assert offered("get", "nodes", *flags, cluster.second[:-3]) == [cluster.second]
    assert offered("get", "vms", *flags, "") == ["cache", "db", "late"]
    assert offered("get", "vms", *flags, "d") == ["db"]
    assert "web" in offered("get", "vms", *flags[:2], "-A", "")
    assert offered("describe-node", *flags, cluster.first) == [cluster.first]
    assert cluster.first in offered("map", "--live", *flags[:2], "")
    assert offered("map", *flags[:2], cluster.first)[-1] == cluster.first
    assert offered("explain", *flags, "") == ["pod/cache", "pod/late", "vmi/db"]
    assert offered("explain", *flags, "vm/") == ["vm/db"]
    assert offered("explain", *flags, "d") == ["db"]
    assert offered("explain", *flags, "vm", "") == offered("explain", "vmi", *flags, "d") == ["db"]
    assert offered("explain", *flags, "pod", "") == ["cache", "late"]
    assert offered("explain", "vm/db", *flags, "") == []


def test_contexts_namespaces_and_rollouts_are_offered(cluster: SmallCluster) -> None:
    kubeconfig = ("--kubeconfig", str(cluster.plane.kubeconfig))
    context = json.loads(cluster.plane.kubeconfig.read_text())["current-context"]
    assert offered("top", *kubeconfig, "--context", context[:2]) == [context]
    assert {cluster.namespace, cluster.other} <= set(offered("get", "vms", *kubeconfig, "-n", ""))
    for line in (("explain", "--namespace"), ("doctor", "-n"), ("describe-node", "--pod-namespace")):
        command, option = line
        assert offered(command, *kubeconfig, option, cluster.other) == [cluster.other]
    labels = {ROLLOUT_LABEL: "spring"}
    rollout = {"metadata": {"name": "kvplace-rollout-spring", "labels": labels}}
    maps = f"/api/v1/namespaces/{cluster.namespace}/configmaps"
    cluster.plane.request("POST", maps, rollout)
    for verb in ("status", "resume", "delete"):
        assert offered("rollout", verb, *kubeconfig, "-n", cluster.namespace, "") == ["spring"]
        assert offered("rollout", verb, *kubeconfig, "-n", cluster.other, "") == []
    cluster.plane.request("DELETE", f"{maps}/kvplace-rollout-spring")


@pytest.mark.parametrize("server", ["https://127.0.0.1:1", "https://no.such.host.invalid"])
def test_without_a_cluster_nothing_is_offered_and_nothing_stated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], server: str
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nusers: [{name: u, user: {token: t}}]\n"
        f"clusters: [{{name: c, cluster: {{server: '{server}'}}}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\n"
    )
    assert offered("get", "nodes", "--kubeconfig", str(kubeconfig), "") == []
    assert offered("explain", "--kubeconfig", str(tmp_path / "none"), "") == []
    assert offered("explain", "--kubeconfig", str(kubeconfig), "-n", "") == []
    assert offered("rollout", "status", "--kubeconfig", str(kubeconfig), "") == []
    assert offered("explain", "--kubeconfig", str(kubeconfig), "--context", "") == ["c"]
    assert offered("explain", "--kubeconfig", str(tmp_path / "none"), "--context", "") == []
    assert capfd.readouterr() == ("", "")
