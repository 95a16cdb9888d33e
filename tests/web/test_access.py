"""Only clients with the URL of this run are answered; nothing can be changed, and browsers are restricted."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from kvplace.nodes.node_cache import NodeCache
from kvplace.web import application
from kvplace.web.application import page_files
from tests.nodes.machines import TWO
from tests.web.map_client import visitor
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped

FACTS = (
    "/api/cluster",
    "/api/nodes/worker-0",
    "/api/vms/shop/vm-1",
    "/api/search?q=worker",
    "/api/events",
)
"""Every path that shows something of the cluster."""


@pytest.fixture
async def stage() -> StagedCluster:
    return await cluster_of(TWO, 1)


@pytest.mark.parametrize("path", FACTS)
@pytest.mark.parametrize("place", ["", "/another-run", "/%00", "//", "/."])
async def test_without_the_secret_path_no_client_learns_anything(
    stage: StagedCluster, path: str, place: str
) -> None:
    async with mapped(stage) as url, visitor(url.rstrip("/").rpartition("/")[0]) as anybody:
        found, body, _ = await anybody.ask(place + path)
        assert found == 403
        assert b"worker" not in body
        assert b"each run has its own" in body


@pytest.mark.parametrize("path", FACTS)
@pytest.mark.parametrize("host", ["evil.example", "10.0.0.7", "127.0.0.1.evil.example", "[::1", ""])
@pytest.mark.parametrize("secret", ["", "the-secret"])
async def test_a_name_that_leads_to_this_machine_by_dns_rebinding_gets_nothing(
    stage: StagedCluster, path: str, host: str, secret: str
) -> None:
    async with mapped(stage, secret=secret) as url, visitor(url) as browser:
        found, body, _ = await browser.ask(path, headers={"Host": host})
        assert found == 403
        assert b"worker" not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:18080", "127.0.0.1", "127.0.0.1:1", "[::1]:8080"])
async def test_the_end_of_a_tunnel_on_another_port_is_this_machine(stage: StagedCluster, host: str) -> None:
    async with mapped(stage) as url, visitor(url) as reader:
        assert (await reader.json("/api/cluster", Host=host))[0] == 200


async def test_each_run_has_a_secret_that_cannot_be_guessed(stage: StagedCluster) -> None:
    secrets = set()
    for _ in range(3):
        async with mapped(stage) as url:
            secrets.add(url.rstrip("/").rpartition("/")[2])
    assert len(secrets) == 3
    assert min(map(len, secrets)) >= 32


async def test_without_a_secret_every_client_of_this_machine_may_read(stage: StagedCluster) -> None:
    async with mapped(stage, secret="") as url, visitor(url) as anybody:
        assert url.count("/") == 3
        assert (await anybody.json("/api/cluster"))[0] == 200


async def test_only_this_machine_can_connect(stage: StagedCluster) -> None:
    async with mapped(stage) as url:
        assert url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("size", [1, 1 << 20])
async def test_a_request_with_a_body_is_refused(stage: StagedCluster, size: int) -> None:
    async with mapped(stage) as url, visitor(url) as reader:
        status, body, _ = await reader.ask("/api/cluster", data=b"x" * size)
    assert (status, json.loads(body)) == (400, {"error": "requests of the map have no body"})


@pytest.mark.parametrize(
    "path",
    ["/", "/files/app.js", "/api/cluster", "/nowhere", "/files/..%2faccess.py", "/api/nodes/no"],
)
async def test_every_answer_forbids_the_browser_whatever_the_map_does_not_need(
    stage: StagedCluster, path: str
) -> None:
    async with mapped(stage) as url, visitor(url) as anna:
        status, body, headers = await anna.ask(path)
    assert status in (200, 404)
    assert "Traceback" not in body.decode()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == ("no-cache" if path in ("/", "/files/app.js") else "no-store")


async def test_of_many_searches_few_are_under_way_at_a_time(
    stage: StagedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, most = 0, 0

    async def counted_search(_cache: NodeCache, query: str) -> dict[str, str]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(100):
            await asyncio.sleep(0)
        under_way -= 1
        return {"query": query}

    monkeypatch.setattr(application, "search", counted_search)
    async with mapped(stage) as url, visitor(url) as anna:
        answers = await asyncio.gather(*(anna.json(f"/api/search?q={number}") for number in range(50)))
    assert [answer["query"] for _, answer in answers] == [str(number) for number in range(50)]
    assert 1 < most <= 4


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/cluster", "/api/nodes/worker-0"])
async def test_nothing_can_be_changed(stage: StagedCluster, method: str, path: str) -> None:
    async with mapped(stage) as url, visitor(url) as anna:
        status, _, headers = await anna.ask(path, method)
    assert status == 405
    assert headers["Allow"] == "GET,HEAD"


def test_the_pages_load_nothing_from_elsewhere_and_have_no_inline_scripts_or_styles() -> None:
    for name, file in page_files().items():
        text = file.content.decode()
        links = re.findall(r"""(?:https?:)?//[^\s"']+""", re.sub(r"(?m)//.*$|/\*.*?\*/", "", text))
        assert [link for link in links if "www.w3.org/2000/svg" not in link] == [], name
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", text), (
                name
            )
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), (
                name
            )
