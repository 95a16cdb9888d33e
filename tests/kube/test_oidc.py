"""OIDC in kubeconfigs (`auth-provider`): tokens that are valid, are renewed, or cannot be."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from harness.certificates import Certificates
from kvplace.core.errors import Misconfigured
from kvplace.kube.credentials import CredentialOptions, load_credentials


def jwt(*, lasts: float, name: str = "me") -> str:
    return with_claims(json.dumps({"exp": time.time() + lasts, "name": name}, ensure_ascii=False))


def with_claims(claims: str) -> str:
    parts = (b'{"alg":"none"}', claims.encode(), b"signature")
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


VALID, EXPIRED = jwt(lasts=86400), jwt(lasts=-60)


@dataclass
class Issuer:
    """A small OIDC issuer on loopback, what it answers, and what it was sent."""

    certificates: Certificates
    answer: Any = field(default_factory=lambda: {"id_token": VALID})
    """None: it never answers."""
    status: int = 200
    url: str = ""
    received: list[tuple[str, str | None]] = field(default_factory=list)

    async def discover(self, request: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "token_endpoint": f"{self.url}/token"})

    async def renew(self, request: web.Request) -> web.Response:
        self.received.append((await request.text(), request.headers.get("Authorization")))
        if self.answer is None:
            await asyncio.Event().wait()
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def issuer(tmp_path: Path) -> AsyncIterator[Issuer]:
    (tmp_path / "issuer").mkdir()
    started = Issuer(Certificates.issue(tmp_path / "issuer"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*started.certificates.serve)
    application = web.Application()
    application.router.add_get("/.well-known/openid-configuration", started.discover)
    application.router.add_post("/token", started.renew)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    started.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    yield started
    await runner.cleanup()


async def header(folder: Path, provider: Any, **more: Any) -> str | None:
    """Return the Authorization header for a user with an `auth-provider`."""
    document = {
        "clusters": [{"name": "c", "cluster": {"server": "http://one:6443"}}],
        "users": [{"name": "u", "user": {"auth-provider": provider, **more}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    path = folder / "config"
    path.write_text(json.dumps(document))
    return await (await load_credentials(CredentialOptions(str(path)))).authorization()


def oidc(**settings: Any) -> dict[str, Any]:
    return {"name": "oidc", "config": {"client-id": "kubernetes", "client-secret": "secret", **settings}}


def renewing(issuer: Issuer, **settings: Any) -> dict[str, Any]:
    ca = base64.b64encode(issuer.certificates.ours.file.read_bytes()).decode()
    given = {"idp-certificate-authority-data": ca, "id-token": EXPIRED, "refresh-token": "old", **settings}
    kept = {key: value for key, value in given.items() if value is not None}
    return oidc(**{"idp-issuer-url": issuer.url, **kept})


@pytest.fixture
def without_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it seem that the package `kubernetes` is not installed."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "kubernetes", None)


@pytest.mark.usefixtures("without_client")
@pytest.mark.parametrize("name", ["me", "Jürgen ÿÿÿ", "?>~?>~?>~"])
async def test_a_valid_token_is_used_as_it_is_whatever_its_claims_contain(tmp_path: Path, name: str) -> None:
    token = jwt(lasts=86400, name=name)
    assert await header(tmp_path, oidc(**{"id-token": token})) == f"Bearer {token}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how the client calls aiohttp
class TestRenewal:
    @pytest.mark.parametrize("token", [EXPIRED, None], ids=["expired", "none"])
    async def test_the_issuer_renews_a_token_by_the_refresh_token(
        self, tmp_path: Path, issuer: Issuer, token: str | None
    ) -> None:
        assert await header(tmp_path, renewing(issuer, **{"id-token": token})) == f"Bearer {VALID}"
        secret = base64.b64encode(b"kubernetes:secret").decode()
        assert issuer.received == [("grant_type=refresh_token&refresh_token=old", f"Basic {secret}")]

    async def test_the_ca_of_the_issuer_may_be_a_file_and_a_public_client_has_no_secret(
        self, tmp_path: Path, issuer: Issuer
    ) -> None:
        ca = {
            "idp-certificate-authority": str(issuer.certificates.ours.file),
            "idp-certificate-authority-data": None,
        }
        provider = renewing(issuer, **ca)
        del provider["config"]["client-secret"]
        assert await header(tmp_path, provider) == f"Bearer {VALID}"
        assert issuer.received[0][1] == f"Basic {base64.b64encode(b'kubernetes:').decode()}"

    @pytest.mark.parametrize("trusted", ["stranger", None])
    async def test_an_issuer_whose_certificate_is_not_trusted_receives_nothing(
        self, tmp_path: Path, issuer: Issuer, trusted: str | None
    ) -> None:
        ca = None
        if trusted:
            ca = base64.b64encode(issuer.certificates.stranger.file.read_bytes()).decode()
        with pytest.raises(
            Misconfigured, match=r"(?i)context 'here' of kubeconfig .*certificate verify failed"
        ):
            await header(tmp_path, renewing(issuer, **{"idp-certificate-authority-data": ca}))
        assert issuer.received == []

    async def test_an_issuer_without_tls_receives_nothing(self, tmp_path: Path, issuer: Issuer) -> None:
        url = issuer.url.replace("https:", "http:")
        with pytest.raises(Misconfigured, match="its idp-issuer-url must begin with https://"):
            await header(tmp_path, renewing(issuer, **{"idp-issuer-url": url}))

    @pytest.mark.parametrize(
        ("status", "answer"),
        [
            (400, {"error": "invalid_grant"}),
            (200, {}),
            (200, []),
            (200, 5),
            (200, "abc"),
            (200, {"id_token": ""}),
            (200, {"id_token": None}),
            (200, {"id_token": 5}),
        ],
    )
    async def test_an_issuer_that_gives_no_token_is_named(
        self, tmp_path: Path, issuer: Issuer, status: int, answer: Any
    ) -> None:
        issuer.status, issuer.answer = status, answer
        with pytest.raises(Misconfigured, match=f"{issuer.url} does not renew its token: .+; log in again"):
            await header(tmp_path, renewing(issuer))

    async def test_an_issuer_that_does_not_answer_is_named(
        self, tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issuer.answer = None
        monkeypatch.setattr("kvplace.kube.oidc._RENEWAL_S", 0.5)
        said = f"{issuer.url} does not renew its token: no answer within 0.5 s; log in again"
        with pytest.raises(Misconfigured, match=said):
            await header(tmp_path, renewing(issuer))

    @pytest.mark.parametrize("authority", ["!!", base64.b64encode(b"x").decode()])
    async def test_a_wrong_ca_of_the_issuer_is_named_as_such(
        self, tmp_path: Path, issuer: Issuer, authority: str
    ) -> None:
        with pytest.raises(Misconfigured, match=r"the CA of its issuer \(idp-certificate-authority\) cannot"):
            await header(tmp_path, renewing(issuer, **{"idp-certificate-authority-data": authority}))

    @pytest.mark.parametrize(("refresh_token", "warnings"), [("old", 0), ("new", 1)])
    async def test_a_refresh_token_that_is_replaced_is_reported(
        self,
        tmp_path: Path,
        issuer: Issuer,
        caplog: pytest.LogCaptureFixture,
        refresh_token: str,
        warnings: int,
    ) -> None:
        issuer.answer = {"id_token": VALID, "refresh_token": refresh_token}
        with caplog.at_level(logging.WARNING, logger="kvplace"):
            assert await header(tmp_path, renewing(issuer)) == f"Bearer {VALID}"
        assert caplog.text.count("has replaced the refresh token") == warnings

    async def test_an_issuer_that_is_not_there_is_named(self, tmp_path: Path, issuer: Issuer) -> None:
        url = "https://127.0.0.1:1"
        with pytest.raises(Misconfigured, match=f"{url} does not renew its token: .+; log in again"):
            await header(tmp_path, renewing(issuer, **{"idp-issuer-url": url}))


@pytest.mark.usefixtures("without_client")
async def test_without_the_client_of_kubernetes_a_token_to_renew_is_refused_in_one_sentence(
    tmp_path: Path, issuer: Issuer
) -> None:
    with pytest.raises(Misconfigured) as refused:
        await header(tmp_path, renewing(issuer))
    assert str(refused.value) == (
        f"context 'here' of kubeconfig {tmp_path / 'config'} cannot be used: its user's OIDC token "
        "(`auth-provider`) must be renewed, and only the Python package kubernetes does that, which is not "
        "installed here (kvplace's images leave it out): let kubectl renew it, or use a kubeconfig with a "
        "token or a client certificate"
    )


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ({"name": "gcp"}, "its auth-provider is 'gcp'; it must be oidc"),
        ("oidc", "its auth-provider must be a mapping with name and config"),
        ({"name": 5, "config": {}}, "its auth-provider must be a mapping with name and config"),
        ({"name": "oidc"}, "its auth-provider must be a mapping with name and config"),
        ({"name": "oidc", "config": "x"}, "its auth-provider must be a mapping with name and config"),
        (oidc(), "needs client-id, idp-issuer-url and refresh-token"),
        (oidc(**{"id-token": EXPIRED, "idp-issuer-url": "https://x"}), "needs client-id, idp-issuer-url and"),
        (oidc(**{"id-token": EXPIRED, "refresh-token": 5}), "of its auth-provider must be strings"),
        (oidc(**{"id-token": 5}), "of its auth-provider must be strings"),
        (oidc(**{"id-token": "a.b"}), "its id-token is not a JSON Web Token"),
        (oidc(**{"id-token": "a.b.c"}), "its id-token is not a JSON Web Token"),
        (oidc(**{"id-token": "a.W10.c"}), "its id-token is not a JSON Web Token"),
        (
            oidc(**{"id-token": with_claims('{"exp": 1' + 400 * "0" + "}")}),
            "its id-token is not a JSON Web Token",
        ),
        (oidc(**{"id-token": with_claims(100_000 * "[")}), "its id-token is not a JSON Web Token"),
        (oidc(**{"id-token": f"{VALID}\n"}), "its token contains an invalid character"),
    ],
)
async def test_a_provider_of_another_form_is_one_sentence(tmp_path: Path, provider: Any, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"context 'here' of kubeconfig .* cannot be used: .*{said}"):
        await header(tmp_path, provider)
