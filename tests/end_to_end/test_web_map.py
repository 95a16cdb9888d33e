"""The web map of a whole installation in a browser: manifests, `serve`, KubeVirt, real tokens."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.browser.page import Page, new_page
from harness.browser.process import Browser, NoBrowser, chromium, running_browser
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.core.placement import PLACEMENT, PodPlacement
from kvplace.core.topology import Topology
from kvplace.web.gate import AUDIENCE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "web.md").read_text()
LIVE = "document.querySelector('#live')?.dataset.state === 'live'"
SAID = "document.querySelector('[role=alert]')?.innerText"


@pytest.fixture(scope="module")
def browser(kvplace: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run a browser that trusts the certificate of the installation."""
    try:
        chromium()
    except NoBrowser as reason:
        pytest.skip(str(reason))
    with running_browser(tmp_path_factory.mktemp("browser"), kvplace.replicas[0].certificate) as running:
        yield running


@pytest.fixture(scope="module")
def operators_token(cluster: ControlPlane, kvplace: Installation) -> str:
    """Make the token as the page states."""
    assert kvplace.replicas
    (block,) = re.findall(r"```\n(kubectl -n kvplace-system create serviceaccount .*?)```", PAGE, re.DOTALL)
    said = ""
    for line in block.splitlines():
        kubectl, *arguments = shlex.split(line)
        assert kubectl == "kubectl"
        said = cluster.kubectl(*arguments)
    return said.strip()


async def sign_in(page: Page, url: str, token: str) -> None:
    await page.see_as()
    await page.open(url)
    await page.until("document.activeElement === document.querySelector('#token')")
    await page.write(token)
    await page.press("Enter")


async def test_an_operator_signs_in_and_sees_a_vm_come_run_and_go(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
    browser: Browser,
    operators_token: str,
) -> None:
    node = f"node-{secrets.token_hex(4)}"
    tile = f"document.querySelector('.tile[href$=\"{node}\"]')"
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    nodes.do(nodes.nodes.add(node_shape(node, machine)))
    with described_nodes(kvplace, {node: machine}):
        async with new_page(browser) as page:
            await sign_in(page, kvplace.replicas[0].web_url, operators_token)
            await page.until(LIVE)
            assert await page.text("#person") == "system:serviceaccount:kvplace-system:map-reader"
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
            assert await page.evaluate(owned) == sorted(kvplace.ledger(node)["owners"])

            await page.click(f'.vms a[href$="{vm_namespace}/db"]')
            await page.until("document.querySelector('dl.facts')")
            assert await page.text("h1") == f"{vm_namespace}/db"
            lit = "[...document.querySelectorAll('.thread.lit')].map(one => Number(one.dataset.cpu))"
            assert set(placement.vcpus) <= set(await page.evaluate(lit))
            assert "socket" in await page.text("dl.facts")

            await page.press("g")
            await page.until(f"{tile}?.innerText.includes('1 VM')")
            cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}/db")
            await page.until(f"{tile}.innerText.includes('0 VMs')")
            assert page.complaints == []


async def test_a_user_who_may_not_list_ledgers_is_informed_and_stays_outside(
    cluster: ControlPlane, kvplace: Installation, vm_namespace: str, browser: Browser
) -> None:
    cluster.create_service_account(vm_namespace, "tenant")
    cluster.kubectl(
        *("create", "rolebinding", "tenant", "-n", vm_namespace, "--clusterrole=kvplace-viewer"),
        f"--serviceaccount={vm_namespace}:tenant",
    )
    token = cluster.kubectl("create", "token", "tenant", "-n", vm_namespace, f"--audience={AUDIENCE}").strip()
    url = kvplace.replicas[0].web_url
    async with new_page(browser) as page:
        await sign_in(page, url, token)
        told = await page.until(f"{SAID}?.includes('may not list') && {SAID}")
        assert f"{vm_namespace}:tenant" in told
        assert "nodeledgers" in told
        assert await page.evaluate("fetch('/api/cluster').then(answer => answer.status)") == 401


async def test_a_token_that_is_not_of_the_cluster_is_refused(kvplace: Installation, browser: Browser) -> None:
    async with new_page(browser) as page:
        await sign_in(page, kvplace.replicas[0].web_url, "not.a.token")
        assert "token" in await page.until(SAID)
        assert await page.evaluate("fetch('/api/cluster').then(answer => answer.status)") == 401
