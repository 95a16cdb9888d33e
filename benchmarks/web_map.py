"""Cost of the web map, and load times of its pages, with 1,000 nodes.

Nodes are two-socket servers with 128 CPUs, in memory, so that the map alone is measured. The browser is
Chromium without a window, and shares the machine's cores with the map. *first* includes computing what no
earlier request needed, such as the rows of all nodes. While readers follow, up to 50 times a second a VM
ends or starts on some node. The CPU time is that of one process that contains the simulated cluster, the map
and all readers. So the cost of a reader is the difference to no reader, and contains both ends of the
reader's connection.
"""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._tables import table
from harness.browser.page import Page, new_page
from harness.browser.process import running_browser
from kvplace.machines.server_types import read_machine
from tests.web.map_client import Visitor, visitor
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped

NODES = 1000
SERVER = "2x-epyc-9354-nps2"
CHANGES_PER_S = 50
SECONDS = 10
READERS = (0, 1, 20, 100)


def main() -> None:
    asyncio.run(_measure())


async def _measure() -> None:
    stage = await cluster_of(read_machine(SERVER), NODES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_browser(folder) as browser:
            async with mapped(stage, streams=max(READERS)) as url:
                print(f"{NODES} nodes, {len(stage.vms)} VMs\n")
                async with visitor(url) as reader:
                    print(table(("what", "bytes", "as gzip", "first", "again"), [
                        await _answer(reader, "the cluster", "/api/cluster"),
                        await _answer(reader, "a node", "/api/nodes/worker-2"),
                        await _answer(reader, "a VM", f"/api/vms/shop/{next(iter(stage.vms.values())).name}"),
                        await _answer(reader, "a search", "/api/search?q=vm-77"),
                    ]))  # fmt: skip
                async with new_page(browser) as page:
                    print(await _drawing(page, url))
                rows = [await _following(stage, url, readers) for readers in READERS]
                print(table(("readers", "CPU time", "bytes a second to each"), rows))


async def _answer(reader: Visitor, what: str, path: str) -> tuple[str, ...]:
    seconds = []
    body = b""
    for _ in range(6):
        began = time.perf_counter()
        _, body, _ = await reader.ask(path, headers={"Accept-Encoding": "identity"})
        seconds.append(time.perf_counter() - began)
    _, zipped, _ = await reader.ask(path, headers={"Accept-Encoding": "gzip"}, auto_decompress=False)
    again = statistics.median(seconds[1:])
    return what, f"{len(body):,}", f"{len(zipped):,}", f"{seconds[0] * 1e3:.0f} ms", f"{again * 1e3:.1f} ms"


async def _drawing(page: Page, url: str) -> str:
    """State how long the browser takes from opening the map to all tiles, and to a node's map."""
    await page.see_as()
    await page.open(url)
    drawn = f"document.querySelectorAll('.tile').length === {NODES}"
    await page.until(drawn)
    began = time.perf_counter()
    await page.evaluate("document.querySelector('.tiles').remove(), location.reload()")
    await page.until(drawn)
    cluster = time.perf_counter() - began
    began = time.perf_counter()
    await page.evaluate("location.hash = '#/node/worker-2'")
    await page.until("document.querySelectorAll('.map .thread').length === 128")
    node = time.perf_counter() - began
    return (
        f"\nin the browser all {NODES} nodes are drawn {cluster * 1e3:.0f} ms after opening the map, "
        f"and a node's map {node * 1e3:.0f} ms after choosing it\n"
    )


async def _following(stage: StagedCluster, url: str, readers: int) -> tuple[str, ...]:
    """Let readers follow while VMs end and start."""
    received = 0

    async def follow() -> None:
        nonlocal received
        async with visitor(url) as reader:
            _, cluster = await reader.json("/api/cluster")
            events = f"{reader.url}/api/events?since={cluster['position']}"
            async with reader.http.get(events) as answer:
                async for chunk in answer.content.iter_any():
                    received += len(chunk)

    following = [asyncio.create_task(follow()) for _ in range(readers)]
    await asyncio.sleep(2)
    received = 0
    chance = random.Random(3)
    used = _cpu_seconds()
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        node = f"worker-{chance.randrange(NODES)}"
        here = [vm for vm in stage.vms.values() if vm.node == node]
        if here and chance.random() < 0.5:
            await stage.end_vm(chance.choice(here))
        else:
            await stage.run_vm(node, 2)
        await asyncio.sleep(1 / CHANGES_PER_S)
    used = _cpu_seconds() - used
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    to_each = f"{received / readers / elapsed:,.0f}" if readers else ""
    return str(readers), f"{used / elapsed * 1e3:.0f} ms a second", to_each


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
