"""Reading the map in a real browser."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from harness.browser.page import Page, new_page
from harness.browser.process import Browser
from tests.web.pictures import LIVE
from tests.web.staged_cluster import StagedCluster, mapped


@contextlib.asynccontextmanager
async def reading(
    stage: StagedCluster, browser: Browser, place: str = "", **changed: Any
) -> AsyncIterator[Page]:
    """Open a place of the map; the browser must have nothing to complain about."""
    async with mapped(stage, **changed) as url, new_page(browser) as page:
        await page.see_as()
        await page.open(url + place)
        await page.until(LIVE)
        await page.until("!document.querySelector('main').hasAttribute('aria-busy')")
        yield page
        assert page.complaints == []
