"""Reading the map in a real browser."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from harness.browser.page import Page, new_page
from harness.browser.process import Browser
from harness.certificates import Certificates
from tests.web.pictures import LIVE
from tests.web.stage import VIEWER, Stage, mapped


@contextlib.asynccontextmanager
async def reading(
    stage: Stage, certificates: Certificates, browser: Browser, place: str = "", **changed: Any
) -> AsyncIterator[Page]:
    """Sign in on the way to a place of the map; the browser must have nothing to complain about."""
    async with mapped(stage, certificates, **changed) as (address, _), new_page(browser) as page:
        await page.see_as()
        await sign_in(page, f"https://{address}/{place}")
        await page.until(LIVE)
        await page.until("!document.querySelector('main').hasAttribute('aria-busy')")
        yield page
        assert page.complaints == []


async def sign_in(page: Page, url: str) -> None:
    await page.open(url)
    await page.until("document.activeElement === document.querySelector('#token')")
    await page.write(VIEWER)
    await page.press("Enter")
