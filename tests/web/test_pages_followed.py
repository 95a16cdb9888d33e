"""Pages that a reader keeps open or opens by an old link, while the cluster changes."""

from __future__ import annotations

from harness.browser.page import new_page
from harness.browser.process import Browser
from tests.nodes.machines import TWO
from tests.web.reading import reading
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped

LOADS = "performance.getEntriesByType('resource').filter(one => one.name.includes('/api/vms/')).length"


async def test_a_part_that_a_reader_has_opened_stays_open_when_the_page_changes(browser: Browser) -> None:
    stage = await cluster_of(TWO, 1, share=0.3)
    vm = await stage.run_vm("worker-0", 2, name="db")
    assert vm is not None
    async with reading(stage, browser, "#/vm/shop/db") as page:
        await page.until("document.querySelector('details')")
        await page.evaluate("document.querySelector('details').open = true")
        assert await stage.run_vm("worker-0", 2, name="web") is not None
        await page.until("document.querySelector('main').innerText.includes('shop/web')")
        assert await page.evaluate("document.querySelector('details').open")


async def test_news_that_change_nothing_on_a_page_leave_its_elements_alone(browser: Browser) -> None:
    stage = await cluster_of(TWO, 1, share=0.3)
    vm = await stage.run_vm("worker-0", 2, name="db")
    assert vm is not None
    async with reading(stage, browser, "#/vm/shop/db") as page:
        await page.until("document.querySelector('details')")
        await page.evaluate("window.before = document.querySelector('h1')")
        await page.evaluate("document.querySelector('.map .thread').focus()")
        for _ in range(2):
            loads = await page.evaluate(LOADS)
            await stage.report("worker-0")
            await page.until(f"{LOADS} > {loads}")
        assert await page.evaluate("window.before.isConnected")


async def test_a_key_moves_among_many_nodes_without_laying_out_those_off_the_screen(browser: Browser) -> None:
    stage = StagedCluster()
    for number in range(300):
        stage.add_node(f"worker-{number}", TWO)
    async with reading(stage, browser) as page:
        await page.evaluate("document.querySelector('.tile').focus()")
        await page.evaluate(
            "window.measured = new Set();"
            " const parent = Object.getOwnPropertyDescriptor(HTMLElement.prototype, 'offsetParent').get;"
            " Object.defineProperty(HTMLElement.prototype, 'offsetParent',"
            " { get() { window.measured.add(this.className); return parent.call(this); } });"
            " const rect = Element.prototype.getBoundingClientRect;"
            " Element.prototype.getBoundingClientRect = function () {"
            " window.measured.add(this.className); return rect.call(this); }"
        )
        await page.press("ArrowRight", "ArrowDown", "ArrowUp")
        assert (await page.evaluate("document.activeElement.getAttribute('aria-label')")).startswith(
            "worker-1: "
        )
        assert "tile" not in await page.evaluate("[...window.measured]")


async def test_a_link_of_an_earlier_run_is_refused_and_reveals_nothing(browser: Browser) -> None:
    stage = await cluster_of(TWO, 2)
    async with mapped(stage) as url, new_page(browser) as page:
        root = url.rstrip("/").rpartition("/")[0]
        await page.open(f"{root}/another-run/#/node/worker-0")
        await page.until("document.body.innerText.includes('each run has its own')")
        assert "worker" not in await page.evaluate("document.body.innerText")


async def test_a_link_that_was_cut_off_is_answered_in_a_sentence(browser: Browser) -> None:
    stage = await cluster_of(TWO, 1)
    async with mapped(stage) as url, new_page(browser) as page:
        await page.open(f"{url}#/node/worker%2")
        await page.until("document.querySelector('[role=alert]')?.innerText.includes('has no node worker%2')")


async def test_a_pod_that_is_left_of_a_migration_is_not_taken_for_one_that_is_under_way(
    browser: Browser,
) -> None:
    stage = await cluster_of(TWO, 1, share=0.3)
    assert await stage.run_vm("worker-0", 2, name="db") is not None
    stage.cluster.create_pod(
        "virt-launcher-left",
        namespace="shop",
        uid="u-left",
        vmi="db",
        node="worker-0",
        request='{"version": 1, "vcpus": 2}',
    )
    async with reading(stage, browser, "#/vm/shop/db") as page:
        await page.until("document.querySelector('main').innerText.includes('it is moving')")
        stage.cluster.change_pod("shop", "virt-launcher-left", phase="Succeeded")
        await page.until("document.querySelector('main').innerText.includes('ended')")
        assert "it is moving" not in await page.text("main")


async def test_a_request_that_cannot_be_read_is_shown_as_it_stands(browser: Browser) -> None:
    stage = await cluster_of(TWO, 1, share=0.0)
    for name, request in (("empty", "{}"), ("null", "null"), ("broken", "{")):
        stage.cluster.create_pod(name, namespace="shop", uid=f"u-{name}", request=request)
    async with reading(stage, browser) as page:
        for name, request in (("empty", "{}"), ("null", "null"), ("broken", "{")):
            await page.evaluate(f"location.hash = '#/vm/shop/{name}'")
            await page.until(f"document.querySelector('h1')?.innerText === 'shop/{name}'")
            assert (await page.text(".facts")).endswith(f"requested\n{request}")


async def test_enter_leads_to_the_typed_name_and_not_to_the_earlier_result(browser: Browser) -> None:
    stage = StagedCluster()
    for name in ("rack-1", "rack-2"):
        stage.add_node(name, TWO)
    async with reading(stage, browser) as page:
        await page.evaluate("document.querySelector('#search').focus()")
        await page.write("rack-")
        await page.until("document.querySelectorAll('#found [role=option]').length === 2")
        await page.write("2")
        await page.press("Enter")
        await page.until("document.querySelector('h1')?.innerText.startsWith('rack-')")
        assert await page.text("h1") == "rack-2"
