"""The state that a reader keeps while the page that he checks follows the cluster."""

from __future__ import annotations

from harness.browser.process import Browser
from tests.nodes.machines import TWO
from tests.web.reading import reading
from tests.web.staged_cluster import StagedCluster, cluster_of

LOADS = "performance.getEntriesByType('resource').filter(one => one.name.includes('/api/vms/')).length"


async def test_what_a_reader_has_opened_stays_open_when_the_page_changes(browser: Browser) -> None:
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
