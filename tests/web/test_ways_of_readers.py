"""The page that a reader gets by an old link, or when the session has ended."""

from __future__ import annotations

from harness.browser.page import new_page
from harness.browser.process import Browser
from tests.nodes.machines import TWO
from tests.web.reading import reading
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped


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


async def test_enter_leads_to_what_was_typed_and_not_to_what_was_found_before(browser: Browser) -> None:
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
