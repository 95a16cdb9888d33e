"""The web map of a whole installation in a browser: manifests, `serve`, KubeVirt, a reader's own rights."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness.browser.page import new_page
from harness.browser.process import Browser, NoBrowser, chromium, running_browser
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import NAMESPACE, Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.core.placement import PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT
from tests.docs.blocks import block
from tests.docs.reading import PROJECT
from tests.docs.shell import Shell
from tests.web.map_process import map_process

LIVE = "document.querySelector('#live')?.dataset.state === 'live'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        chromium()
    except NoBrowser as reason:
        pytest.skip(str(reason))
    with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def readers_map(cluster: ControlPlane, kvplace: Installation) -> Iterator[str]:
    """Run the map with the rights of the role kvplace-viewer alone; gives its URL."""
    assert kvplace.replicas
    cluster.create_service_account(NAMESPACE, "map-reader")
    cluster.kubectl(
        *("create", "clusterrolebinding", "map-reader", "--clusterrole=kvplace-viewer"),
        f"--serviceaccount={NAMESPACE}:map-reader",
    )
    with map_process(cluster.service_account_kubeconfig(NAMESPACE, "map-reader"), "--no-browser") as process:
        yield process.url


async def test_an_operator_sees_a_vm_come_run_and_go(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
    browser: Browser,
    readers_map: str,
) -> None:
    node = f"node-{secrets.token_hex(4)}"
    tile = f"document.querySelector('.tile[href$=\"{node}\"]')"
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    nodes.do(nodes.nodes.add(node_shape(node, machine)))
    with described_nodes(kvplace, {node: machine}):
        async with new_page(browser) as page:
            await page.see_as()
            await page.open(readers_map)
            await page.until(LIVE)
            await page.until(f"{tile}?.innerText.includes('0 VMs')")

            virt.create(VMIS, vm_namespace, vmi_manifest("db"))
            await page.until(f"{tile}.innerText.includes('1 VM')")
            launcher = virt.launcher_pod(vm_namespace, "db")["metadata"]["name"]
            pod = await asyncio.to_thread(
                wait_for, cluster, pods, launcher, lambda pod: PLACEMENT in pod["metadata"]["annotations"]
            )
            placement = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement

            await page.click(f'.tile[href$="{node}"]')
            await page.until("document.querySelector('.map')")
            assert await page.text("h1") == node
            owned = "[...document.querySelectorAll('.map .thread.owned')].map(one => one.dataset.cpu).sort()"
            expected = json.dumps(sorted(kvplace.ledger(node)["owners"]), separators=(",", ":"))
            await page.until(f"JSON.stringify({owned}) === '{expected}'")  # the map may follow a moment later

            await page.click(f'.vms a[href$="{vm_namespace}/db"]')
            await page.until("document.querySelector('dl.facts')")
            assert await page.text("h1") == f"{vm_namespace}/db"
            lit = "[...document.querySelectorAll('.thread.lit')].map(one => Number(one.dataset.cpu))"
            await page.until(f"{json.dumps(placement.vcpus)}.every(cpu => {lit}.includes(cpu))")
            assert "socket" in await page.text("dl.facts")

            await page.press("g")
            await page.until(f"{tile}?.innerText.includes('1 VM')")
            cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}/db")
            await page.until(f"{tile}.innerText.includes('0 VMs')")
            assert page.complaints == []


def test_the_map_of_a_team_is_read_through_the_proxy_of_its_pod(
    cluster: ControlPlane, kvplace: Installation, tmp_path: Path
) -> None:
    assert kvplace.replicas
    shell = Shell(tmp_path, cluster, "default")
    (shell.folder / "docs").symlink_to(PROJECT / "docs")
    shell.run(block("docs/web.md", "kubectl create namespace kvplace-map"))
    try:
        deployment = cluster.request("GET", "/apis/apps/v1/namespaces/kvplace-map/deployments/kvplace-map")
        pod = deployment["spec"]["template"]["spec"]
        containers = {one["name"]: one for one in pod["containers"]}
        program, command, *options = containers["map"]["command"]
        assert (program, command, pod["serviceAccountName"]) == ("kvplace", "web", "kvplace-map")
        upstream = "http://127.0.0.1:8080/"
        assert {f"--upstream={upstream}", "--pass-host-header=false"} <= {*containers["proxy"]["args"]}
        kubeconfig = cluster.service_account_kubeconfig("kvplace-map", "kvplace-map")
        options[options.index("--port=8080")] = "--port=0"
        with map_process(kubeconfig, *options) as process:
            assert _status(process.url, host=urlsplit(upstream).netloc) == 200
            assert _status(process.url, host="map.example.com") == 403
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", str(PROJECT / "docs" / "examples" / "team-map.yaml"))
        cluster.kubectl("delete", "--wait=false", "namespace", "kvplace-map")


def _status(url: str, *, host: str) -> int:
    """Ask the map as a proxy does that sends this host name."""
    address = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(str(address.hostname), address.port)) as connection:
        connection.request("GET", f"{address.path}api/cluster", headers={"Host": host})
        return connection.getresponse().status
