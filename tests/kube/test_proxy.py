"""An API server behind a proxy: the one that the kubeconfig names, else the one of the environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.certificates import Authority
from kvplace.core.errors import Unavailable
from kvplace.kube.calls import ApiCall
from kvplace.kube.credentials import CredentialOptions, load_credentials
from kvplace.kube.session import open_session
from tests.kube.api_stub import ApiStub, answer, api_stub

GET = ApiCall("get", "pods", "/api/v1/pods")


@dataclass
class Proxy:
    """An HTTP proxy that opens tunnels, or refuses to."""

    url: str
    refusal: bytes = b""
    asked: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def http_proxy() -> AsyncIterator[Proxy]:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65536):
                writer.write(content)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        verb, target, _ = head.decode().split(maxsplit=2)
        proxy.asked.append(f"{verb} {target}")
        if proxy.refusal:
            writer.write(proxy.refusal)
            writer.close()
            return
        host, port = target.split(":")
        to_server = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pump(reader, to_server[1]), pump(to_server[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield proxy
    finally:
        server.close()


def behind(stub: ApiStub, folder: Path, proxy: str, ca: Path) -> CredentialOptions:
    """State in the kubeconfig which proxy is before the API server."""
    options = stub.kubeconfig(folder, ca_file=ca, token="t")
    path = Path(options.kubeconfig or "")
    document = json.loads(path.read_text())
    document["clusters"][0]["cluster"]["proxy-url"] = proxy
    path.write_text(json.dumps(document))
    return options


async def test_an_api_server_is_reached_through_the_proxy_which_sees_no_token(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*ca.issue("server"))
    async with api_stub(tls) as stub, http_proxy() as proxy:
        stub.script = [answer({"items": []})]
        async with await open_session(behind(stub, tmp_path, proxy.url, ca.file)) as session:
            assert json.loads(await session.request(GET)) == {"items": []}
            assert proxy.asked == [f"CONNECT {session.server.removeprefix('https://')}"]


async def test_a_proxy_that_fails_is_named_and_not_the_api_server(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*ca.issue("server"))
    async with api_stub(tls) as stub:
        async with http_proxy() as proxy:
            proxy.refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
            options = behind(stub, tmp_path, proxy.url, ca.file)
            async with await open_session(options) as session:
                with pytest.raises(Unavailable, match=r"the proxy refuses.* HTTP 407"):
                    await session.request(GET)
        async with await open_session(options) as session:
            with pytest.raises(Unavailable, match=r"no connection to the proxy .*Connection refused"):
                await session.request(GET)


@pytest.mark.parametrize(
    ("server", "excluded", "proxy"),
    [
        ("https://api.example:6443", "", "http://proxy:3128"),
        ("http://api.example:8080", "", None),
        ("https://api.example:6443", "other.example,example", None),
        ("https://10.1.2.3:6443", "", "http://proxy:3128"),
        ("https://10.1.2.3:6443", "192.168.0.0/16, 10.0.0.0/8", None),
        ("https://[fd00::1]:6443", "fd00::/8", None),
        ("https://10.1.2.3:6443", "10.1.2.3", None),
        ("https://10.1.2.3:6443", "10.1.2.3:6443", None),
        ("https://10.1.2.3:6443", "10.1.2.3:443", "http://proxy:3128"),
        ("https://[fd00::1]:6443", "fd00::1", None),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", None),
        ("https://127.0.0.1:6443", "", None),
        ("https://[::1]:6443", "", None),
        ("https://localhost:6443", "", None),
        ("https://api.example:6443", "*", None),
    ],
)
async def test_the_proxy_of_the_environment_counts_as_for_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, excluded: str, proxy: str | None
) -> None:
    for name in ("https_proxy", "http_proxy", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", excluded)
    path = tmp_path / "config"
    cluster = {"server": server}
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "c"}}],
        "current-context": "here",
    }
    path.write_text(json.dumps(document))
    assert (await load_credentials(CredentialOptions(str(path)))).proxy == proxy
    cluster["proxy-url"] = "http://named:1"
    path.write_text(json.dumps(document))
    assert (await load_credentials(CredentialOptions(str(path)))).proxy == "http://named:1"
