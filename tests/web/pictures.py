"""`python -m tests.web.pictures`: takes the pictures of docs/web.md anew from the sample cluster.

`--looks FOLDER` takes each page also in dark, as a user with deuteranopia sees it, and in a narrow window,
for changes of the map's appearance: check all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.browser.page import new_page
from harness.browser.process import running_browser
from tests.web.sample import sample
from tests.web.staged_cluster import mapped

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
LIVE = "document.querySelector('#live').dataset.state === 'live'"


@dataclass(frozen=True)
class Look:
    """How a user checks the map."""

    scheme: str = "light"
    size: tuple[int, int] = (1280, 900)
    deficiency: str = "none"


LOOKS = {
    "light": Look(),
    "dark": Look("dark"),
    "deuteranopia": Look(deficiency="deuteranopia"),
    "dark-deuteranopia": Look("dark", deficiency="deuteranopia"),
    "narrow": Look(size=(390, 844)),
    "wide": Look(size=(1920, 1080)),
}


async def take(folder: Path, looks: dict[str, Look], prefix: str) -> list[Path]:
    """Take a picture of each page for each check; returns the files."""
    stage, drifting = await sample()
    places = {
        "cluster": ("#/", ".tile"),
        "node": (f"#/node/{drifting.node}", ".map"),
        "vm": (f"#/vm/{drifting.namespace}/{drifting.name}", "dl.facts"),
    }
    files = []
    with tempfile.TemporaryDirectory() as name, running_browser(Path(name)) as browser:
        async with mapped(stage) as url, new_page(browser) as page:
            await page.call("Emulation.setScrollbarsHidden", hidden=True)
            await page.open(url)
            await page.until(LIVE)
            for page_name, (place, shown) in places.items():
                for look_name, look in looks.items():
                    await page.see_as(scheme=look.scheme, size=look.size, deficiency=look.deficiency)
                    await page.evaluate(f"location.hash = '{place}'")
                    await page.until(f"document.querySelector('{shown}')")
                    await page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
                    files.append(folder / f"{prefix}{page_name}{look_name and '-' + look_name}.png")
                    await page.screenshot(files[-1])
            assert page.complaints == []
    return files


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=Path, metavar="FOLDER", help="take every check, into this folder")
    folder = parser.parse_args().looks
    if folder is None:
        files = asyncio.run(take(PICTURES, {"": Look()}, "web-"))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        files = asyncio.run(take(folder, LOOKS, ""))
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
