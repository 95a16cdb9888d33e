"""Requests: what is sent, what each answer means, and that nothing without measure is read."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from harness.certificates import Authority
from harness.control_plane.cluster import ControlPlane
from kvplace.core.errors import Absent, Conflict, Forbidden, KvplaceError, Misconfigured, Refused
from kvplace.core.ledger import OwnershipConflict
from kvplace.kube import credentials
from kvplace.kube.api_errors import (
    OWNERSHIP_RULE,
    ApiUnavailable,
    Expired,
    NotFound,
    Rejected,
    UnusableAnswer,
    error_of_response,
)
from kvplace.kube.calls import ApiCall
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.session import Limits, Session, open_session
from tests.kube.api_stub import ApiStub, answer, api_stub, broken, closing, status

GET = ApiCall("get", "pods", "/api/v1/namespaces/a/pods/b", name="b")


@pytest.fixture
async def stub() -> AsyncIterator[ApiStub]:
    async with api_stub() as running:
        yield running


async def hurried(stub: ApiStub, folder: Path, **limits: Any) -> Session:
    """A session whose pauses last no time."""
    session = await open_session(stub.kubeconfig(folder, token="secret"), Limits(**limits))

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    session.pause = pause  # type: ignore[method-assign, assignment]
    return session


# What an answer means


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (400, "bad request", Rejected),
        (401, "Unauthorized", Forbidden),
        (403, "User cannot", Forbidden),
        (404, "not found", NotFound),
        (404, "not found", Refused),
        (409, "the object has been modified", Conflict),
        (410, "too old", Expired),
        (422, f"spec.owners: Invalid value: {OWNERSHIP_RULE}", OwnershipConflict),
        (422, "spec.claims: Required value", Rejected),
        (429, "too many requests", ApiUnavailable),
        (500, "etcdserver: leader changed", ApiUnavailable),
        (503, "shutting down", ApiUnavailable),
        (504, "request did not complete", ApiUnavailable),
    ],
)
async def test_every_refusal_of_the_server_has_one_meaning(
    stub: ApiStub, tmp_path: Path, code: int, message: str, kind: type[Exception]
) -> None:
    stub.script = [status(code, message)] * 2
    async with await hurried(stub, tmp_path, attempts=1) as session:
        with pytest.raises(kind, match=r"pods") as failure:
            await session.request(GET)
    assert message in str(failure.value)


def test_a_denied_right_names_verb_and_resource() -> None:
    failure = error_of_response(
        403, {}, b'{"message":"User x cannot"}', verb="create", resource="pods/binding"
    )
    assert isinstance(failure, Forbidden)
    assert (
        "create on pods/binding (User x cannot); its role lacks this right: apply the installation again"
        in str(failure)
    )


def test_a_denial_for_another_reason_than_a_right_gives_no_advice_about_roles() -> None:
    body = b'{"message": "events is forbidden: namespace shop is being terminated"}'
    failure = error_of_response(403, {}, body, verb="create", resource="events")
    assert isinstance(failure, Forbidden)
    assert "is being terminated" in str(failure)
    assert "role" not in str(failure)


@given(st.binary(max_size=300), st.integers(300, 599), st.text(max_size=12))
def test_whatever_the_body_of_a_refusal_it_has_a_meaning(body: bytes, code: int, pause: str) -> None:
    failure = error_of_response(code, {"Retry-After": pause}, body, verb="get", resource="pods")
    assert "get" in str(failure)
    if isinstance(failure, ApiUnavailable) and failure.retry_after is not None:
        assert 0 <= failure.retry_after <= 60


def test_the_pause_that_is_asked_for_comes_from_header_or_body() -> None:
    body = json.dumps({"details": {"retryAfterSeconds": 4}}).encode()
    by_body = error_of_response(503, {}, body, verb="get", resource="pods")
    by_header = error_of_response(503, {"Retry-After": "9"}, body, verb="get", resource="pods")
    assert isinstance(by_body, ApiUnavailable)
    assert isinstance(by_header, ApiUnavailable)
    assert (by_body.retry_after, by_header.retry_after) == (4, 9)
    assert not by_body.untouched


# The time of its clock


def dated(date: str) -> Any:
    async def answered(_: web.Request) -> web.StreamResponse:
        return web.Response(text="{}", headers={"Date": date})

    return answered


async def test_the_time_is_that_of_the_api_server(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [dated("Mon, 01 Jun 2026 12:00:00 GMT"), status(403), dated("soon")]
    async with await hurried(stub, tmp_path) as session:
        ours = datetime.now(UTC)
        assert session.server_time >= ours
        await session.request(GET)
        theirs = datetime(2026, 6, 1, 12, tzinfo=UTC)
        assert theirs <= session.server_time < theirs + timedelta(minutes=1)
        with suppress(Forbidden):
            await session.request(GET)
        assert session.server_time >= ours - timedelta(seconds=1)
        await session.request(GET)
        assert session.server_time >= ours


# Trying again


async def test_a_request_that_the_server_rejects_for_load_is_tried_again(
    stub: ApiStub, tmp_path: Path
) -> None:
    stub.script = [status(429, retry_after=1), status(429), answer({"ok": True})]
    async with await hurried(stub, tmp_path) as session:
        assert await session.request(GET) == b'{"ok": true}'
    assert len(stub.asked) == 3


async def test_load_that_does_not_end_is_an_error_after_a_few_attempts(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [status(429)] * 9
    async with await hurried(stub, tmp_path, attempts=4) as session:
        with pytest.raises(ApiUnavailable):
            await session.request(GET)
    assert len(stub.asked) == 4


@pytest.mark.parametrize("fault", [status(500), status(503), broken()], ids=["500", "503", "broken"])
async def test_a_write_with_unknown_outcome_is_sent_once(stub: ApiStub, tmp_path: Path, fault: Any) -> None:
    stub.script = [fault, answer({})]
    write = ApiCall("create", "pods/binding", "/x", body=b"{}")
    async with await hurried(stub, tmp_path) as session:
        with pytest.raises(ApiUnavailable) as failure:
            await session.request(write)
    assert not failure.value.untouched
    assert len(stub.asked) == 1


# Limits


async def test_an_answer_without_measure_is_not_read(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [stub.forever(*[b"x" * 65536] * 64)]
    async with await hurried(stub, tmp_path) as session:
        with pytest.raises(UnusableAnswer, match="larger than 1048576 bytes"):
            await session.request(GET, limit=1 << 20)
        await stub.gone.wait()


async def test_a_refusal_without_measure_is_not_read(stub: ApiStub, tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=403)
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b"x" * 65536)
        stub.gone.set()
        return response

    stub.script = [endless]
    async with await hurried(stub, tmp_path) as session:
        with pytest.raises(Forbidden):
            await session.request(GET)


async def test_an_answer_that_does_not_come_is_not_waited_for(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [stub.forever(b"{")]
    async with await hurried(stub, tmp_path, answer_s=0.2) as session:
        with pytest.raises(ApiUnavailable, match="in time"):
            await session.request(GET)


async def test_after_a_refused_connection_certainly_nothing_was_done(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        stub = ApiStub()
        stub.url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        async with await hurried(stub, tmp_path, attempts=2) as session:
            with pytest.raises(ApiUnavailable, match="no connection") as failure:
                await session.request(GET)
    assert failure.value.untouched
    where = stub.url.removeprefix("http://")
    assert f"no connection to the API server at {where} (Connection refused)" in str(failure.value)


async def test_redirects_are_not_followed_with_our_token(stub: ApiStub, tmp_path: Path) -> None:
    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/somewhere-else")

    stub.script = [elsewhere, answer({})]
    async with await hurried(stub, tmp_path) as session:
        with pytest.raises(Rejected):
            await session.request(GET)
    assert len(stub.asked) == 1


# Credentials


async def test_the_token_is_sent_and_the_answer_is_asked_for_as_json(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [answer({})]
    async with await hurried(stub, tmp_path) as session:
        await session.request(GET)
    assert stub.asked[0].headers["Authorization"] == "Bearer secret"
    assert stub.asked[0].headers["Accept"] == "application/json"


async def test_a_token_that_was_rotated_is_read_again_after_401(stub: ApiStub, tmp_path: Path) -> None:
    async def rotating(request: web.Request) -> web.StreamResponse:
        stub.kubeconfig(tmp_path, token="fresh")
        return await status(401, "expired")(request)

    stub.script = [rotating, answer({"ok": 1}), answer({"ok": 2})]
    async with await hurried(stub, tmp_path) as session:
        assert await session.request(GET) == b'{"ok": 1}'
        assert await session.request(GET) == b'{"ok": 2}'
    sent = [request.headers["Authorization"] for request in stub.asked]
    assert sent == ["Bearer secret", "Bearer fresh", "Bearer fresh"]


async def test_credentials_that_stay_bad_are_an_error(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [status(401)] * 9
    async with await hurried(stub, tmp_path) as session:
        with pytest.raises(Forbidden, match="credentials"):
            await session.request(GET)
    assert len(stub.asked) == 2


async def test_a_ca_that_was_replaced_in_its_file_is_trusted_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*old.issue("server"))
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(old.file.read_bytes())
    async with api_stub(tls) as stub:
        stub.script = [closing(answer({"ok": 1})), closing(answer({"ok": 2}))]
        async with await open_session(stub.kubeconfig(tmp_path, ca_file=trusted)) as session:
            assert await session.request(GET) == b'{"ok": 1}'
            tls.load_cert_chain(*new.issue("server"))
            with pytest.raises(Misconfigured, match="check the CA"):
                await session.request(GET)
            trusted.write_bytes(old.file.read_bytes() + new.file.read_bytes())
            assert await session.request(GET) == b'{"ok": 2}'


async def test_a_ca_with_as_little_in_it_as_older_clusters_have_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python demands more of a CA since 3.13 than kubectl does; EKS, for one, made CAs without key ids."""
    authority, create = Authority(tmp_path, "kubernetes"), ssl.create_default_context

    def as_since_3_13(*arguments: Any, **given: Any) -> ssl.SSLContext:
        context = create(*arguments, **given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_since_3_13)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue("server"))
    (tmp_path / "ca.crt").write_bytes(authority.file.read_bytes())
    (tmp_path / "token").write_text("token-of-the-pod")
    async with api_stub(tls) as stub:
        stub.script = [answer({"by": "kubeconfig"}), answer({"by": "pod"})]
        async with await open_session(stub.kubeconfig(tmp_path, ca_file=authority.file)) as session:
            assert await session.request(GET) == b'{"by": "kubeconfig"}'
        address = URL(stub.url)
        monkeypatch.delenv("KUBECONFIG", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "nothing"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.host))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
        monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", tmp_path)
        async with await open_session() as session:
            assert await session.request(GET) == b'{"by": "pod"}'


async def test_a_token_given_by_hand_wins_and_is_not_searched_for_elsewhere(
    stub: ApiStub, tmp_path: Path
) -> None:
    options = stub.kubeconfig(tmp_path, token="secret")
    stub.script = [status(401)] * 9
    async with await open_session(CredentialOptions(kubeconfig=options.kubeconfig, token="mine")) as session:
        with pytest.raises(Forbidden):
            await session.request(GET)
    assert [request.headers["Authorization"] for request in stub.asked] == ["Bearer mine"]


async def test_a_plugin_is_asked_for_a_token_and_again_after_401(stub: ApiStub, tmp_path: Path) -> None:
    """The plugin counts its calls in a file and makes its token of that."""
    plugin = tmp_path / "plugin"
    count = tmp_path / "count"
    plugin.write_text(
        f"#!/bin/sh\necho x >> {count}\n"
        'printf \'{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential",'
        f'"status":{{"token":"call-%d"}}}}\' $(wc -l < {count})\n'
    )
    plugin.chmod(0o755)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    options = stub.kubeconfig(tmp_path, exec=command)
    stub.script = [status(401), answer({})]
    async with await open_session(options) as session:
        await session.request(GET)
    sent = [request.headers["Authorization"] for request in stub.asked]
    assert sent == ["Bearer call-1", "Bearer call-2"]


async def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"kubeconfig .*/nowhere"):
        await open_session(CredentialOptions(kubeconfig=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("text", ["", "[]", "clusters: 7", "{", "contexts: [{name: a}]\ncurrent-context: a"])
async def test_a_kubeconfig_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(Misconfigured, match="kubeconfig"):
        await open_session(CredentialOptions(kubeconfig=str(path)))


async def test_without_any_cluster_the_sentence_states_where_one_was_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Absent, match="KUBECONFIG"):
        await open_session()


# TLS, against the real API server


def changed_kubeconfig(plane: ControlPlane, folder: Path, cluster: Any, user: Any) -> CredentialOptions:
    """The control plane's kubeconfig with another cluster and user in it."""
    config = json.loads(plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"] = cluster
    config["users"][0]["user"] = user
    path = folder / "config"
    path.write_text(json.dumps(config))
    return CredentialOptions(kubeconfig=str(path))


async def test_the_certificate_of_the_server_is_checked(control_plane: ControlPlane, tmp_path: Path) -> None:
    changed = changed_kubeconfig(control_plane, tmp_path, {"server": control_plane.url}, {"token": "t"})
    async with await open_session(changed) as session:
        with pytest.raises(Misconfigured, match="CA"):
            await session.request(GET)


@pytest.mark.parametrize(
    ("says", "kind", "said"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            Misconfigured,
            r"\(wrong version number\); check the server in",
        ),
        (bytes.fromhex("15030300020250"), Misconfigured, r"\(tlsv1 alert internal error\); check the server"),
        (b"", ApiUnavailable, r"127.0.0.1:\d+ \(it was closed during the handshake\)$"),
    ],
    ids=["plain HTTP", "an alert", "nothing"],
)
async def test_a_server_that_does_not_speak_tls_is_named_by_its_answer(
    tmp_path: Path, says: bytes, kind: type[KvplaceError], said: str
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(says)
        writer.close()

    stub = ApiStub()
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        stub.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with await open_session(stub.kubeconfig(tmp_path), Limits(connect_s=60, attempts=1)) as session:
            with pytest.raises(kind, match=said):
                await session.request(GET)


async def test_a_client_certificate_speaks_for_us(control_plane: ControlPlane, tmp_path: Path) -> None:
    certificate, key = control_plane.issue_certificate("kube-test-client")
    cluster = {"server": control_plane.url, "certificate-authority": str(control_plane.ca_file)}
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    async with await open_session(changed_kubeconfig(control_plane, tmp_path, cluster, user)) as session:
        with pytest.raises(Forbidden, match="kube-test-client"):
            await session.request(GET)


async def test_a_service_account_without_rights_learns_which_it_lacks(
    control_plane: ControlPlane, namespace: str
) -> None:
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "default")
    call = ApiCall("create", "pods/binding", f"/api/v1/namespaces/{namespace}/pods/a/binding", body=b"{}")
    async with await open_session(CredentialOptions(kubeconfig=str(kubeconfig))) as session:
        with pytest.raises(Forbidden, match=r"create on pods/binding.*system:serviceaccount"):
            await session.request(call)


async def test_a_wrong_token_and_missing_rights_are_different_errors(control_plane: ControlPlane) -> None:
    options = CredentialOptions(kubeconfig=str(control_plane.kubeconfig), token="wrong")
    async with await open_session(options) as session:
        with pytest.raises(Forbidden, match="credentials"):
            await session.request(GET)


async def test_in_a_pod_the_service_account_is_used(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(control_plane.service_account_token(namespace, "default") + "\n")
    (tmp_path / "ca.crt").write_bytes(control_plane.ca_file.read_bytes())
    address = URL(control_plane.url)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.host))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", tmp_path)
    async with await open_session() as session:
        with pytest.raises(Forbidden, match=f"system:serviceaccount:{namespace}:default"):
            await session.request(GET)


async def test_a_request_given_up_in_its_handshake_leaves_no_connection(control_plane: ControlPlane) -> None:
    answered = False
    rounds = 0
    while not answered:
        before = open_sockets()
        session = await open_session(CredentialOptions(kubeconfig=str(control_plane.kubeconfig)))
        asking = asyncio.create_task(session.request(ApiCall("list", "pods", "/api/v1/pods")))
        for _ in range(rounds):
            await asyncio.sleep(0)
        answered = asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await session.close()
        # Of those before, the garbage collector may have closed some meanwhile.
        assert open_sockets() <= before, f"given up after {rounds} rounds of the loop"
        rounds += 5


def open_sockets() -> set[str]:
    """The sockets of this process."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return {link for link in links if link.startswith("socket:")}
