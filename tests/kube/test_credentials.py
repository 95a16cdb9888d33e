"""The credentials of a pod, which are read without the official client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.certificates import Certificates
from kvplace.core.errors import Absent, Misconfigured
from kvplace.kube import credentials
from kvplace.kube.credentials import (
    TOKEN_AGE_S,
    CredentialOptions,
    TokenFile,
    load_credentials,
)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process resemble one in a pod; gives the folder of its service account."""
    certificates = Certificates.issue(tmp_path)
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(certificates.ours.file.read_bytes())
    (folder / "token").write_text("first\n")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", folder)
    return folder


@pytest.mark.usefixtures("pod")
async def test_a_pod_talks_to_the_service_of_the_api_server() -> None:
    found = await load_credentials(CredentialOptions())
    assert (found.server, await found.authorization()) == ("https://10.96.0.1:443", "Bearer first")
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1


@pytest.mark.usefixtures("pod")
async def test_an_address_of_version_6_is_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert (await load_credentials(CredentialOptions())).server == "https://[fd00::1]:443"


@pytest.mark.usefixtures("pod")
async def test_a_given_token_goes_before_that_of_the_service_account() -> None:
    found = await load_credentials(CredentialOptions(token="given"))
    assert await found.authorization() == "Bearer given"


async def test_the_token_is_read_again_once_a_minute_and_an_unreadable_one_is_not_taken(pod: Path) -> None:
    now = 0.0
    token = TokenFile(pod / "token", lambda: now)
    (pod / "token").write_text("second")
    assert await token() == "Bearer first"
    now += TOKEN_AGE_S
    assert await token() == "Bearer second"
    (pod / "token").write_text("")
    now += TOKEN_AGE_S
    assert await token() == "Bearer second"
    (pod / "token").write_text("third")
    now += TOKEN_AGE_S
    assert await token() == "Bearer third"


@pytest.mark.parametrize(("file", "content"), [("token", ""), ("token", None), ("ca.crt", "junk")])
async def test_a_service_account_that_cannot_be_used_is_named(
    pod: Path, file: str, content: str | None
) -> None:
    if content is None:
        (pod / file).unlink()
    else:
        (pod / file).write_text(content)
    with pytest.raises(Misconfigured, match="serviceaccount cannot be used"):
        await load_credentials(CredentialOptions())


@pytest.mark.usefixtures("pod")
async def test_outside_a_pod_and_without_a_kubeconfig_the_error_names_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(Absent, match=r"KUBECONFIG.*KUBERNETES_SERVICE_HOST"):
        await load_credentials(CredentialOptions())


@pytest.mark.usefixtures("pod")
def test_in_a_pod_the_official_client_is_not_imported() -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from kvplace.kube import credentials\n"
        "credentials.SERVICE_ACCOUNT = pathlib.Path(sys.argv[1])\n"
        "asyncio.run(credentials.load_credentials(credentials.CredentialOptions()))\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('kubernetes', 'yaml')])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(credentials.SERVICE_ACCOUNT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "[]\n"
