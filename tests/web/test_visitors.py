"""Requests of users with the right to the map are answered, by token, session or proxy; no others are."""

from __future__ import annotations

import asyncio
import re
import ssl
from http.cookies import SimpleCookie
from typing import Any

import aiohttp
import pytest

from harness.certificates import Certificates
from kvplace.nodes.node_cache import NodeCache
from kvplace.web import application
from kvplace.web.files import page_files
from kvplace.web.visitors import COOKIE
from tests.nodes.machines import TWO
from tests.web.stage import TENANT, VIEWER, Stage, cluster_of, mapped
from tests.web.visiting import AS_VIEWER, visitor

FACTS = (
    "/api/cluster",
    "/api/nodes/worker-0",
    "/api/vms/shop/vm-1",
    "/api/search?q=worker",
    "/api/events",
)
"""Every path that shows something of the cluster."""


@pytest.fixture
async def stage() -> Stage:
    return await cluster_of(TWO, 1)


@pytest.mark.parametrize("path", FACTS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer nobodys"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic YTpi"}, 401),
        ({"Cookie": f"{COOKIE}=forged.forged"}, 401),
        ({"X-Remote-User": "anna", "X-Remote-Group": "system:masters"}, 401),
        ({"Authorization": f"Bearer {TENANT}"}, 403),
    ],
    ids=[
        "nobody",
        "unknown token",
        "empty token",
        "password",
        "forged cookie",
        "headers of a proxy",
        "tenant",
    ],
)
async def test_no_other_client_learns_anything(
    stage: Stage, certificates: Certificates, path: str, headers: dict[str, str], status: int
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anybody:
        found, body, _ = await anybody.ask(path, headers=headers)
        assert found == status
        assert b"worker" not in body
        assert b'"error"' in body


async def test_a_tenant_is_informed_which_right_he_lacks_and_who_gives_it(
    stage: Stage, certificates: Certificates
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as tenant:
        _, answer = await tenant.json("/api/cluster", Authorization=f"Bearer {TENANT}")
    assert answer["error"].startswith("tom may not list nodeledgers in this cluster")
    assert "ClusterRole kvplace-viewer" in answer["error"]


async def test_signing_in_gives_a_cookie_that_scripts_cannot_read_and_signing_out_takes_it(
    stage: Stage, certificates: Certificates
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anna:
        status, _, headers = await anna.ask("/")
        assert (status, headers["Location"]) == (303, "login")
        status, _, headers = await anna.ask("/login", "POST", data={"token": f" {VIEWER}\n"})
        assert (status, headers["Location"]) == (303, "./")
        cookie = SimpleCookie(headers["Set-Cookie"])[COOKIE]
        assert cookie["httponly"]
        assert cookie["secure"]
        assert (cookie["samesite"], cookie["path"], cookie["domain"]) == ("Strict", "/", "")
        assert VIEWER not in headers["Set-Cookie"]
        with_cookie = {"Cookie": f"{COOKIE}={cookie.value}"}
        status, answer = await anna.json("/api/cluster", **with_cookie)
        assert (status, answer["person"], answer["signOut"]) == (200, "anna", True)
        status, _, _ = await anna.ask("/", headers=with_cookie)
        assert status == 200
        status, _, headers = await anna.ask("/logout", "POST", headers=with_cookie)
        assert (status, SimpleCookie(headers["Set-Cookie"])[COOKIE].value) == (303, "")


@pytest.mark.parametrize(
    ("form", "status", "sentence"),
    [
        ({"token": "nobodys"}, 401, "does not accept this token"),
        ({"token": ""}, 401, "the token is empty"),
        ({}, 401, "the token is empty"),
        ({"token": "two words"}, 401, "paste one line"),
        ({"token": TENANT}, 403, "tom may not list nodeledgers"),
        ({"token": "x" * 100_000}, 401, "the token is empty"),
        ({"token": "<script>alert(1)</script>"}, 401, "does not accept this token"),
    ],
)
async def test_the_sign_in_page_states_in_a_sentence_why_not(
    stage: Stage, certificates: Certificates, form: dict[str, str], status: int, sentence: str
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anybody:
        found, body, headers = await anybody.ask("/login", "POST", data=form)
    assert found == status
    assert sentence in body.decode()
    assert "<script>alert" not in body.decode()
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"token=a"),
        ("multipart/form-data; boundary=a", b"--a\r\nbroken"),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\nx\r\n--a--"),
        ("application/x-www-form-urlencoded; charset=unheard-of", b"token=%20"),
        ("application/x-www-form-urlencoded", b"token=\xff"),
        ("application/json", b'{"token": "a"}'),
    ],
)
async def test_whatever_a_stranger_sends_to_the_sign_in_page_is_not_a_token(
    stage: Stage, certificates: Certificates, kind: str, body: bytes
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anybody:
        status, page, headers = await anybody.ask("/login", "POST", data=body, headers={"Content-Type": kind})
    assert status == 401
    assert "token" in page.decode()
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://elsewhere.example"}]
)
async def test_another_site_cannot_sign_a_reader_in_or_out(
    stage: Stage, certificates: Certificates, headers: dict[str, str]
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anybody:
        for path in ("/login", "/logout"):
            status, body, answered = await anybody.ask(path, "POST", data={"token": VIEWER}, headers=headers)
            assert status == 403
            assert b"another site" in body
            assert "Set-Cookie" not in answered


async def test_a_proxy_states_who_is_asking_and_rbac_whether_he_may(
    stage: Stage, certificates: Certificates
) -> None:
    proxy = certificates.ours.issue("front-proxy")
    async with (
        mapped(stage, certificates, proxy=True) as (address, _),
        visitor(address, certificates, proxy) as asking,
    ):
        status, answer = await asking.json("/api/cluster", **{"X-Remote-User": "anna"})
        assert (status, answer["person"], answer["signOut"]) == (200, "anna", False)
        assert (await asking.json("/api/cluster", **{"X-Remote-User": "tom"}))[0] == 403
        status, answer = await asking.json("/api/cluster", **AS_VIEWER)
        assert status == 401
        assert "X-Remote-User" in answer["error"]
        assert (await asking.ask("/login"))[0] == 303


@pytest.mark.parametrize("whose", ["nobody", "another name", "another CA"])
async def test_no_client_but_the_proxy_connects_where_there_is_one(
    stage: Stage, certificates: Certificates, whose: str
) -> None:
    pairs: dict[str, Any] = {
        "nobody": None,
        "another name": certificates.ours.issue("somebody"),
        "another CA": certificates.stranger.issue("front-proxy"),
    }
    async with (
        mapped(stage, certificates, proxy=True) as (address, _),
        visitor(address, certificates, pairs[whose]) as asking,
    ):
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await asking.ask("/api/cluster", headers={"X-Remote-User": "anna"})


@pytest.mark.parametrize(
    "path",
    ["/", "/login", "/files/app.js", "/api/cluster", "/nowhere", "/files/..%2fgate.py", "/api/nodes/no"],
)
async def test_every_answer_forbids_the_browser_whatever_the_map_does_not_need(
    stage: Stage, certificates: Certificates, path: str
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anna:
        status, body, headers = await anna.ask(path, headers=AS_VIEWER)
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
    stage: Stage, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
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
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anna:
        answers = await asyncio.gather(*(anna.json(f"/api/search?q={number}") for number in range(50)))
    assert [answer["query"] for _, answer in answers] == [str(number) for number in range(50)]
    assert 1 < most <= 4


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/cluster", "/api/nodes/worker-0"])
async def test_nothing_can_be_changed(
    stage: Stage, certificates: Certificates, method: str, path: str
) -> None:
    async with mapped(stage, certificates) as (address, _), visitor(address, certificates) as anna:
        status, _, headers = await anna.ask(path, method, headers=AS_VIEWER)
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
