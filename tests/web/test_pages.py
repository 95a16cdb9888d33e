"""The pages in a real browser: what readers see, with mouse, keyboard and screen reader, light and dark."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from harness.browser.page import Page, new_page
from harness.browser.process import Browser, running_browser
from harness.waiting import wait_until
from kvplace.core.drawing.svg_blocks import DARK, LIGHT
from kvplace.core.ledger import LedgerChange, claim_of
from kvplace.core.node_devices import DeviceCount, DeviceReport, NodeDevices, PodDevice
from kvplace.core.scalars import NodeName, NumaId, PodUid, ResourceName
from kvplace.machines.server_types import read_machine
from kvplace.web.feed import Feed
from tests.nodes.machines import TWO
from tests.web.pictures import LIVE, LOOKS, Look, take
from tests.web.reading import reading
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped

SERVER = "2x-epyc-9354-nps2"


async def focused(page: Page) -> str:
    return str(await page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''"))


async def test_the_overview_shows_every_node_to_eyes_and_screen_readers(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 3)
    stage.cluster.create_node("bare")
    async with reading(stage, browser) as page:
        names = "[...document.querySelectorAll('.tile .name')].map(one => one.innerText)"
        assert await page.evaluate(names) == ["bare", "worker-0", "worker-1", "worker-2"]
        assert "4\nnodes, 1 unusable" in (await page.text(".numbers")).replace("\n ", "\n")
        assert await page.text(".brand") == "kvplace rack-7"
        links = await page.accessible("link")
        assert any(link.startswith("worker-0: ") and "CPUs free" in link for link in links)
        assert any(link.startswith("bare: unusable: ") for link in links)
        assert "Search nodes and VMs" in await page.accessible("combobox")


async def test_a_free_block_shows_the_nodes_that_have_it(browser: Browser) -> None:
    stage = StagedCluster()
    for name in ("empty", "busy"):
        stage.add_node(name, TWO)
    for _ in range(4):
        await stage.run_vm("busy", 4)
    async with reading(stage, browser) as page:
        buttons = await page.accessible("button")
        assert "1 node with 8 free CPUs or more in one NUMA node" in buttons
        await page.click('[data-key="numa-8"]')
        await page.until("document.querySelectorAll('.tile').length === 1")
        assert await page.text(".tile .name") == "empty"
        assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
        await page.click('[data-key="numa-8"]')
        await page.until("document.querySelectorAll('.tile').length === 2")


async def test_changes_of_the_cluster_are_shown_without_loading_the_page_again(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("worker-0", TWO)
    async with reading(stage, browser) as page:
        await page.evaluate("window.isTheSame = true")
        await page.until("document.querySelector('.tile').innerText.includes('0 VMs')")
        vm = await stage.run_vm("worker-0", 4, name="db")
        assert vm is not None
        await page.until("document.querySelector('.tile').innerText.includes('1 VM')")
        await stage.report("worker-0", {vm.uid: TWO.packages[1].cpus}, sentence="it strayed")
        await page.until("document.querySelector('.tile .alarm')")
        stage.add_node("worker-1", TWO)
        await page.until("document.querySelectorAll('.tile').length === 2")
        stage.cluster.delete_node("worker-1")
        await page.until("document.querySelectorAll('.tile').length === 1")
        await page.press("Tab")
        await page.evaluate("location.hash = '#/node/worker-0'")
        await page.until("document.querySelector('.faults')?.innerText.includes('drift')")
        await stage.end_vm(vm)
        await page.until("!document.querySelector('.faults') && document.querySelector('.map')")
        assert await page.evaluate("window.isTheSame")


async def test_a_link_to_a_node_leads_there(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 1)
    async with reading(stage, browser, "#/node/worker-0") as page:
        await page.until("document.querySelector('.map')")
        assert await page.text("h1") == "worker-0"
        cpus = "[...document.querySelectorAll('.map .thread')].map(one => Number(one.dataset.cpu))"
        assert sorted(await page.evaluate(cpus)) == list(range(128))
        named = await page.accessible("link")
        first = next(one for one in named if one.startswith("CPU 1: "))
        assert first.startswith("CPU 1: owned by A shop/vm-")
        host = next(one for one in await page.accessible("image") if one.startswith("CPU 0: "))
        assert host.startswith("CPU 0: reserved with QEMU's own threads of A shop/vm-")
        assert "distance 12 to NUMA 1; 32 to NUMA 2, 3" in await page.text(".map h4")


async def test_the_free_blocks_are_one_stop_of_the_tab_key_among_which_arrows_move(browser: Browser) -> None:
    stage = await cluster_of(TWO, 2)
    async with reading(stage, browser) as page:
        assert await page.evaluate("document.querySelectorAll('.blocks [tabindex=\"0\"]').length") == 1
        await page.evaluate("document.querySelector('.blocks button').focus()")
        await page.press("ArrowRight", "ArrowDown")
        assert await page.evaluate("document.activeElement.dataset.key") == "numa-2"
        await page.press("Enter")
        assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
        await page.press("Tab")
        assert await page.evaluate("!document.activeElement.closest('.blocks')")


async def test_the_keyboard_alone_leads_from_the_overview_to_a_vm_and_back(browser: Browser) -> None:
    stage = await cluster_of(TWO, 3)
    async with reading(stage, browser) as page:
        await page.evaluate("document.querySelector('#order').focus()")
        await page.press("Tab")
        assert (await focused(page)).startswith("worker-0: ")
        await page.press("ArrowRight")
        assert (await focused(page)).startswith("worker-1: ")
        await page.press("End")
        assert (await focused(page)).startswith("worker-2: ")
        await page.press("Enter")
        await page.until("document.querySelector('h1').innerText === 'worker-2'")
        await page.until("document.activeElement.id === 'content'")
        await page.press("Tab", "Tab")
        assert await focused(page) == await page.evaluate(
            "document.querySelector('.map .thread').getAttribute('aria-label')"
        )
        while not (await focused(page)).split(": ")[1].startswith("owned"):
            before = await focused(page)
            await page.press("ArrowRight")
            assert await focused(page) != before
        wanted = (await focused(page)).rpartition(" ")[2]
        await page.press("Enter")
        await page.until("document.querySelector('dl.facts')")
        assert await page.text("h1") == wanted
        await page.press("g")
        await page.until("document.querySelector('.tiles')")
        await page.press("?")
        await page.until("document.querySelector('#key-help').open")
        await page.press("Escape")
        await page.until("!document.querySelector('#key-help').open")


async def test_search_goes_to_a_vm_by_keyboard(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("worker", read_machine(SERVER))
    for name in ("orders-db", "orders-web", "cache"):
        await stage.run_vm("worker", 2, name=name)
    async with reading(stage, browser) as page:
        await page.press("/")
        await page.write("shop orders")
        await page.until("document.querySelectorAll('#found [role=option]').length === 2")
        options = [one for one in await page.accessible("option") if one.startswith("shop/")]
        assert options == ["shop/orders-db on worker", "shop/orders-web on worker"]
        await page.press("ArrowDown", "ArrowDown")
        assert await page.evaluate("document.querySelector('[aria-selected=true]').id") == "found-1"
        await page.press("Enter")
        await page.until("document.querySelector('dl.facts')")
        assert await page.text("h1") == "shop/orders-web"


async def test_the_page_of_a_vm_states_where_it_sits_and_shows_just_its_cpus(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 1)
    vm = next(iter(stage.vms.values()))
    async with reading(stage, browser, f"#/vm/{vm.namespace}/{vm.name}") as page:
        await page.until("document.querySelector('.map')")
        assert "Pinned: every thread was read back" in await page.text(".state")
        letter = await page.evaluate("document.querySelector('.thread.lit b').innerText")
        assert f"On worker-0 this VM is {letter}" in " ".join((await page.text("h2.seat")).split())
        assert await page.evaluate("document.querySelector('.next')") is None
        lit = "[...document.querySelectorAll('.thread.lit')].map(one => Number(one.dataset.cpu))"
        assert sorted(await page.evaluate(lit)) == sorted(vm.placement.placement.vcpus)
        facts = await page.text("dl.facts")
        assert "socket 0 · NUMA 0 · L3 0" in facts
        assert f"kubectl kvplace explain vm/{vm.name} -n shop" in facts
        assert "4 vCPUs · any · exclusive · 4 GiB of memory\n" in facts
        assert "the same L3 cache" in await page.text("article")
        assert re.search(r"claimed 2026-11-22T08:00:00Z \((\d+ (d|h|min|s) ago|in \d+ (d|h|min|s))\)", facts)


async def test_beside_the_map_of_a_node_are_its_vms_and_the_key(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 1)
    async with reading(stage, browser, "#/node/worker-0") as page:
        await page.see_as(size=(1280, 900))
        await page.until("document.querySelector('.map')")
        box = "(() => {{ const {{left, right, top}} = document.querySelector('{}').getBoundingClientRect();"
        box += " return [left, right, top]; }})()"
        _, right_of_map, top_of_map = await page.evaluate(box.format(".map"))
        left_of_list, _, top_of_list = await page.evaluate(box.format(".vms"))
        left_of_key, _, _ = await page.evaluate(box.format(".key"))
        assert right_of_map <= min(left_of_list, left_of_key)
        assert abs(top_of_list - top_of_map) < 20


async def test_a_vm_that_is_not_pinned_gets_its_state_and_the_next_step(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 2, name="db")
    assert vm is not None
    await stage.report("worker", {vm.uid: TWO.packages[1].cpus}, sentence="it strayed")
    stage.cluster.create_pod("virt-launcher-late", namespace="shop", uid="u-late", vmi="late", request="{}")
    stage.cluster.put_vmi(
        "shop",
        "new",
        {"metadata": {"annotations": {"cpu-set": "one-l3"}}, "status": {"phase": "Pending"}},
    )
    expected = {
        "db": ("NotPinned: it strayed", "kubectl kvplace explain vm/db -n shop"),
        "late": ("Waiting: it has no node", "kubectl kvplace explain vm/late -n shop"),
        "new": ("NotCreated: KubeVirt has not created its pod", "kubectl -n shop describe vmi new"),
    }
    async with reading(stage, browser) as page:
        for name, (state, command) in expected.items():
            await page.evaluate(f"location.hash = '#/vm/shop/{name}'")
            await page.until(f"document.querySelector('h1').innerText === 'shop/{name}'")
            assert state in await page.text(".state")
            assert command in await page.text(".next")


async def test_no_word_in_the_list_of_vms_is_broken(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 1)
    async with reading(stage, browser, "#/node/worker-0") as page:
        await page.see_as(size=(560, 900))
        await page.until("document.querySelector('.vms tbody tr')")
        cell = "document.querySelector('.vms td .state').lastChild"
        lines = f"(() => {{ const range = document.createRange(); range.selectNodeContents({cell});"
        assert await page.evaluate(f"{lines} return range.getClientRects().length; }})()") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_colours_follow_the_system_until_the_reader_chooses(browser: Browser, scheme: str) -> None:
    def as_rgb(colour: str) -> str:
        return "rgb({}, {}, {})".format(*(int(colour[place : place + 2], 16) for place in (1, 3, 5)))

    pages = {"light": as_rgb(LIGHT.page), "dark": as_rgb(DARK.page)}
    other = {"light": "dark", "dark": "light"}[scheme]
    ground = "getComputedStyle(document.body).backgroundColor"
    async with reading(await cluster_of(TWO, 1), browser) as page:
        await page.see_as(scheme=scheme)
        assert await page.evaluate(ground) == pages[scheme]
        choose = "document.querySelector('#theme').value = '{}'; theme.dispatchEvent(new Event('change'))"
        await page.evaluate(choose.format(other))
        assert await page.evaluate(ground) == pages[other]
        await page.evaluate("window.isOld = true; location.reload()")
        await page.until(f"!window.isOld && {LIVE} && {ground} === '{pages[other]}'")
        await page.evaluate(choose.format(""))
        assert await page.evaluate(ground) == pages[scheme]


async def test_names_that_resemble_html_are_shown_as_they_are(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 2)
    assert vm is not None
    hostile = "<img src=x onerror=alert(1)>"
    record = await stage.cluster.read_ledger(NodeName("worker"))
    assert record is not None
    claim = claim_of(PodUid("u-hostile"), vm.placement.placement, namespace=hostile, pod=hostile, vmi=hostile)
    await stage.cluster.write_ledger(record, LedgerChange(releases=(vm.uid,)))
    record = await stage.cluster.read_ledger(NodeName("worker"))
    assert record is not None
    await stage.cluster.write_ledger(record, LedgerChange((claim,)))
    async with reading(stage, browser, "#/node/worker") as page:
        assert hostile in await page.text(".vms")
        assert await page.evaluate("document.querySelectorAll('img').length") == 0


async def test_a_missing_node_or_vm_is_reported_in_a_sentence(browser: Browser) -> None:
    async with (
        mapped(await cluster_of(TWO, 1)) as url,
        new_page(browser) as page,
    ):
        await page.open(f"{url}#/node/nowhere")
        await page.until("document.querySelector('[role=alert]')?.innerText.includes('has no node nowhere')")


async def test_a_reader_is_informed_that_the_map_may_be_old(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading(await cluster_of(TWO, 1), browser, heartbeat_s=0.05) as page:
        monkeypatch.setattr(Feed, "outage", lambda _: "watching nodes has failed for 40 s")
        told = "may be old: watching nodes has failed for 40 s"
        await page.until(f"document.querySelector('#live').innerText === '{told}'")
        monkeypatch.undo()
        await page.until(LIVE)


async def test_a_narrow_window_scrolls_the_map_and_nothing_else(browser: Browser) -> None:
    stage = await cluster_of(read_machine(SERVER), 2)
    async with reading(stage, browser) as page:
        await page.see_as(size=(390, 800))
        for place in ("#/", "#/node/worker-0", f"#/vm/shop/{next(iter(stage.vms.values())).name}"):
            await page.evaluate(f"location.hash = '{place}'")
            await page.until(f"document.querySelector('{'.tiles' if place == '#/' else '.map'}')")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, place


def test_a_browser_that_is_stopped_leaves_no_process_behind(tmp_path: Path) -> None:
    def processes() -> list[str]:
        found = []
        for arguments in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path).encode() in arguments.read_bytes():
                    found.append(arguments.parent.name)
        return found

    with running_browser(tmp_path):
        assert processes()
    # The kernel informs only their parent, which is init by now.
    wait_until(lambda: not processes(), lambda: f"processes {processes()} are left")


async def test_the_overview_names_problems_and_the_fragmentation_of_each_node(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("busy", TWO)
    stage.cluster.create_node("bare")
    async with reading(stage, browser) as page:
        assert "bare unusable" in await page.text(".trouble")
        vm = await stage.run_vm("busy", 4)
        assert vm is not None
        await stage.report("busy", {vm.uid: TWO.packages[1].cpus}, sentence="it strayed")
        await page.until("document.querySelector('.trouble').innerText.includes('busy 1 VM NotPinned')")
        stage.cluster.create_pod(
            "virt-launcher-late", namespace="shop", uid="u-late", vmi="late", request="{}"
        )
        await page.until("document.querySelector('.trouble').innerText.includes('shop/late Waiting')")
        free = [numa.cpus & ~vm.claim.owned & TWO.allocatable for numa in TWO.numa_nodes]
        largest = max(cpus.bit_count() for cpus in free)
        assert f"largest block {largest}" in await page.text('.tile[href$="busy"]')
        assert any("% fragmented" in link for link in await page.accessible("link"))


async def test_the_pictures_of_the_docs_can_be_taken_anew(tmp_path: Path, browser: Browser) -> None:
    files = await take(tmp_path, {"": Look(), "narrow": LOOKS["narrow"]}, "web-")
    assert [file.name for file in files] == [
        f"web-{page}{look}.png" for page in ("cluster", "node", "vm") for look in ("", "-narrow")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


async def test_a_node_without_its_agent_reports_it_on_every_page(browser: Browser) -> None:
    stage = await cluster_of(TWO, 2)
    vm = await stage.run_vm("worker-0", 2, name="db")
    assert vm is not None
    await stage.lose_agent("worker-0")
    async with reading(stage, browser) as page:
        await page.until("document.querySelector('.trouble')?.innerText.includes('its agent is gone')")
        links = await page.accessible("link")
        assert any(link.startswith("worker-0: ") and "its agent is gone" in link for link in links)
        assert not any(link.startswith("worker-1: ") and "agent" in link for link in links)
        for place in ("node/worker-0", "vm/shop/db"):
            await page.evaluate(f"location.hash = '#/{place}'")
            await page.until("document.querySelector('main .alarm')?.innerText.includes('gent is gone')")
        stage.cluster.put_agent_pod("worker-0")
        await page.until("!document.querySelector('main').innerText.includes('agent is gone')")


async def test_pages_of_node_and_vm_show_devices_and_whether_they_are_local(browser: Browser) -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 4, name="vnf")
    assert vm is not None
    vf = ResourceName("intel.com/vf")
    counts = (DeviceCount(vf, NumaId(0), 4, 3), DeviceCount(vf, NumaId(1), 4, 3))
    given = tuple(PodDevice(vf, NumaId(node), f"0000:c{node}:00.2") for node in (0, 1))
    stage.devices["worker"] = DeviceReport(NodeDevices(counts), {vm.uid: given})
    await stage.report("worker")
    async with reading(stage, browser, "#/vm/shop/vnf") as page:
        await page.until("document.querySelector('.map')")
        facts = await page.text("dl.facts")
        assert "intel.com/vf 0000:c0:00.2 on NUMA 0 (local)" in facts
        assert "intel.com/vf 0000:c1:00.2 on NUMA 1 (not local)" in facts
        assert await page.text("dl.facts .alarm") == "intel.com/vf 0000:c1:00.2 on NUMA 1 (not local)"
        assert "3 of 4 intel.com/vf free" in await page.text(".map")
        await page.evaluate("location.hash = '#/node/worker'")
        await page.until("document.querySelector('.vms')")
        assert "1 intel.com/vf on NUMA 1 (not local)" in await page.text(".vms")
