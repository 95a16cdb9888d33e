"""kubeconfig files: which context counts, how files are merged, and what is reported of a wrong one."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from harness.certificates import Certificates
from kvplace.core.errors import Misconfigured
from kvplace.kube.credentials import CredentialOptions, load_credentials
from kvplace.kube.kubeconfig import context_names, kubeconfig_files, read_context


def config(folder: Path, name: str = "config", *, current: str = "here", **context: Any) -> Path:
    """Write a kubeconfig with the contexts `here` and `there`."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    document = {
        "clusters": [
            {"name": "c", "cluster": {"server": "https://one:6443/", "certificate-authority": "ca.crt"}},
            {"name": "plain", "cluster": {"server": "http://two:8080"}},
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", **context}},
            {"name": "there", "context": {"cluster": "plain", "user": "u", "namespace": "team-a"}},
        ],
        "current-context": current,
    }
    path.write_text(json.dumps(document))
    return path


def test_the_current_context_counts_unless_another_one_is_wanted(tmp_path: Path) -> None:
    path = str(config(tmp_path))
    assert read_context(path, None).name == "here"
    assert (read_context(path, "there").namespace, read_context(path, None).namespace) == ("team-a", "")
    assert context_names(path) == ("here", "there")


def test_relative_paths_are_relative_to_the_file_that_they_are_in(tmp_path: Path) -> None:
    found = read_context(str(config(tmp_path, "sub/config")), None)
    assert found.cluster["certificate-authority"] == str(tmp_path / "sub" / "ca.crt")


def test_of_several_files_the_first_entry_wins_and_missing_files_are_skipped(tmp_path: Path) -> None:
    first = config(tmp_path, "first", current="", namespace="from-first")
    second = config(tmp_path, "second", current="there", namespace="from-second")
    files = os.pathsep.join(map(str, (tmp_path / "missing", first, second)))
    assert read_context(files, None).name == "there"
    assert read_context(files, "here").namespace == "from-first"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("thre", "did you mean 'there'"), ("mars", "for example here, there")],
)
def test_an_unknown_context_gets_a_suggestion(tmp_path: Path, wanted: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"no context '{wanted}'.*{said}"):
        read_context(str(config(tmp_path)), wanted)


def test_without_a_current_context_one_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"--context, for example here, there"):
        read_context(str(config(tmp_path, current="")), None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clusters": 7}, "clusters must be a list"),
        ({"users": [{"user": {}}]}, "users must have a name"),
        ({"users": []}, "names the user 'u', which is not there"),
        ({"clusters": [{"name": "c", "cluster": {}}]}, "has no server"),
        *(
            (
                {"clusters": [{"name": "c", "cluster": {"server": server}}]},
                f"cluster 'c' of kubeconfig .* has the server '{re.escape(server)}'; it must be a URL such as https://",
            )
            for server in (
                "10.0.0.1:6443",
                "ftp://a",
                "https://",
                "https://a:99999",
                "https://[::1",
                "https://a..b",
            )
        ),
        (
            {"contexts": [{"name": "here", "context": {"cluster": ["c"], "user": "u"}}]},
            "context 'here' of kubeconfig .*: cluster must be the name of a cluster",
        ),
    ],
)
def test_a_kubeconfig_that_contradicts_itself_is_named(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = config(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(Misconfigured, match=said):
        read_context(str(path), None)


async def test_a_home_that_does_not_exist_has_no_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_entry(_: object) -> None:
        raise KeyError

    with pytest.raises(Misconfigured, match="kubeconfig ~no-such-user/config does not exist"):
        await load_credentials(CredentialOptions("~no-such-user/config"))
    for name in ("HOME", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", has_no_entry)  # as in a container with another user than its image's
    assert kubeconfig_files(None) is None


@pytest.mark.parametrize("content", [b"\x00\xff", b"a: [", b"- a", b"", b"a: 1\na: 2"])
def test_a_file_that_is_not_a_kubeconfig_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match=f"kubeconfig {path}"):
        read_context(str(path), None)


async def test_a_client_certificate_may_be_in_the_kubeconfig_and_its_key_stays_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    ours = Certificates.issue(tmp_path).ours
    certificate, key = ours.issue("me")
    (tmp_path / "ca.crt").write_bytes(ours.file.read_bytes())
    path = config(tmp_path)
    document = json.loads(path.read_text())
    document["users"][0]["user"] = {
        "client-certificate-data": encoded(certificate),
        "client-key-data": encoded(key),
    }
    path.write_text(json.dumps(document))
    found = await load_credentials(CredentialOptions(str(path)))
    assert found.tls is not None
    assert (await found.authorization(), found.server) == (None, "https://one:6443")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_user_is_asked_for_the_passphrase_of_a_key(tmp_path: Path) -> None:
    ours = Certificates.issue(tmp_path).ours
    certificate, key = ours.issue("me")
    (tmp_path / "ca.crt").write_bytes(ours.file.read_bytes())
    locked = load_pem_private_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    key.write_bytes(locked)
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    program = (
        "import asyncio, sys; from kvplace.kube.credentials import *;"
        "asyncio.run(load_credentials(CredentialOptions(sys.argv[1])))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, with_user(config(tmp_path), user)],
        check=False,
        input=b"secret\n",
        capture_output=True,
        start_new_session=True,  # without a terminal OpenSSL asks on stdin
    )
    assert ended.stderr.splitlines()[-1].startswith(b"kvplace.core.errors.Misconfigured: context 'here'")
    assert b"pass phrase" not in ended.stderr


def encoded(path: Path) -> str:
    import base64

    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"username": "me", "password": "pw"}, "Basic bWU6cHc="),
        ({"tokenFile": "token"}, "Bearer from-file"),
        ({}, None),
    ],
)
async def test_every_way_to_state_who_one_is_without_a_plugin(
    tmp_path: Path, user: dict[str, Any], header: str | None
) -> None:
    path = config(tmp_path, current="there")
    (tmp_path / "token").write_text("from-file\n")
    document = json.loads(path.read_text())
    document["users"][0]["user"] = user
    path.write_text(json.dumps(document))
    found = await load_credentials(CredentialOptions(str(path)))
    assert (await found.authorization(), found.namespace) == (header, "team-a")


async def test_a_kubeconfig_may_act_as_another_client_and_a_flag_goes_before_it(tmp_path: Path) -> None:
    path = config(tmp_path, current="there")
    document = json.loads(path.read_text())
    document["users"][0]["user"] = {"token": "t", "as": "eve", "as-groups": ["a", "b"]}
    path.write_text(json.dumps(document))
    found = await load_credentials(CredentialOptions(str(path)))
    groups = (("Impersonate-Group", "a"), ("Impersonate-Group", "b"))
    assert found.impersonation == (("Impersonate-User", "eve"), *groups)
    found = await load_credentials(CredentialOptions(str(path), user="bob"))
    assert found.impersonation == (("Impersonate-User", "bob"),)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"client-certificate-data": "%%%"}, "client-certificate-data is not in base64"),
        ({"client-certificate": "nowhere"}, "nowhere: No such file"),
        ({"tokenFile": "nowhere"}, "nowhere: No such file"),
    ],
)
async def test_credentials_that_cannot_be_read_are_named(
    tmp_path: Path, user: dict[str, Any], said: str
) -> None:
    (tmp_path / "ca.crt").write_bytes(Certificates.issue(tmp_path).ours.file.read_bytes())
    path = config(tmp_path)
    document = json.loads(path.read_text())
    document["users"][0]["user"] = user
    path.write_text(json.dumps(document))
    with pytest.raises(Misconfigured, match=f"context 'here' of kubeconfig.*{said}"):
        await load_credentials(CredentialOptions(str(path)))


@pytest.mark.parametrize("token", ["a\nb", "tökén", ["t"]])
async def test_a_token_that_cannot_be_one_is_named(tmp_path: Path, token: object) -> None:
    path = config(tmp_path, current="there")
    document = json.loads(path.read_text())
    document["users"][0]["user"] = {"token": token}
    path.write_text(json.dumps(document))
    with pytest.raises(Misconfigured, match=f"context 'there' of kubeconfig {path} .* its token contains"):
        await load_credentials(CredentialOptions(str(path)))


@pytest.mark.parametrize(
    ("plugin", "said", "reported"),
    [
        (
            ["none-of-that-name"],
            "'none-of-that-name' that it logs in with gives no credentials: .*No such file",
            "",
        ),
        (
            ["sh", "-c", "echo session over, log in again >&2; exit 3"],
            "'sh' .* ended with exit code 3, and reports on stderr$",
            "session over, log in again\n",
        ),
        (["echo", "{}"], "'echo' .* gives no credentials: its answer has not the apiVersion", ""),
    ],
)
async def test_a_login_program_that_gives_no_credentials_is_named_and_reports_on_stderr(
    tmp_path: Path, plugin: list[str], said: str, reported: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, current="there")
    document = json.loads(path.read_text())
    document["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": plugin[0],
            "args": plugin[1:],
        }
    }
    path.write_text(json.dumps(document))
    with pytest.raises(Misconfigured, match=said):
        await load_credentials(CredentialOptions(str(path)))
    assert capfd.readouterr() == ("", reported)


def with_user(path: Path, user: dict[str, Any], **cluster: Any) -> str:
    """Give the kubeconfig's user other credentials, and its clusters more settings."""
    document = json.loads(path.read_text())
    document["users"][0]["user"] = user
    for one in document["clusters"]:
        one["cluster"] |= cluster
    path.write_text(json.dumps(document))
    return str(path)


async def test_a_login_program_is_searched_for_beside_the_kubeconfig_as_kubectl_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sub"
    path = config(tmp_path, "sub/config", current="there")
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "issued"},
    }
    (folder / "login").write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    (folder / "login").chmod(0o755)
    (tmp_path / "empty").write_text("")
    plugin = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login"}}
    files = os.pathsep.join((str(tmp_path / "empty"), with_user(path, plugin)))
    monkeypatch.chdir(tmp_path)
    found = await load_credentials(CredentialOptions(files))
    assert await found.authorization() == "Bearer issued"


async def test_a_null_field_counts_as_missing(tmp_path: Path) -> None:
    path = config(tmp_path, current="there")
    files = with_user(path, {"exec": None, "token": None, "username": "me", "password": None, "as": None})
    found = await load_credentials(CredentialOptions(files))
    assert (await found.authorization(), found.impersonation) == ("Basic bWU6", ())
    path = config(tmp_path, user=None)
    assert read_context(str(path), None).user == {}


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    files = os.pathsep.join((str(tmp_path / "empty"), str(config(tmp_path))))
    assert read_context(files, None).name == "here"


async def test_a_ca_may_come_with_comments_in_any_language(tmp_path: Path) -> None:
    ca = Certificates.issue(tmp_path).ours.file.read_bytes()
    (tmp_path / "ca.crt").write_bytes("# Főtanúsítvány\n".encode() + b"# \xe9\n" + ca)
    found = await load_credentials(CredentialOptions(str(config(tmp_path))))
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"junk"])
async def test_a_ca_without_a_certificate_does_not_stand_for_those_of_the_system(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "ca.crt").write_bytes(content)
    with pytest.raises(Misconfigured, match="its certificate-authority holds no certificate"):
        await load_credentials(CredentialOptions(str(config(tmp_path))))


@pytest.mark.parametrize("skipped", [False, True])
async def test_the_servers_certificate_is_checked_unless_the_kubeconfig_skips_it(
    tmp_path: Path, skipped: bool
) -> None:
    Certificates.issue(tmp_path).ours.file.rename(tmp_path / "ca.crt")
    path = config(tmp_path)
    document = json.loads(path.read_text())
    document["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = skipped
    path.write_text(json.dumps(document))
    tls = (await load_credentials(CredentialOptions(str(path)))).tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (
        (ssl.CERT_NONE, False) if skipped else (ssl.CERT_REQUIRED, True)
    )


async def test_a_kubeconfig_states_all_about_whom_it_acts_as(tmp_path: Path) -> None:
    user = {"token": "t", "as": "eve", "as-uid": "7", "as-user-extra": {"acme.com/scope": ["a", "b"]}}
    found = await load_credentials(CredentialOptions(with_user(config(tmp_path, current="there"), user)))
    assert found.impersonation == (
        ("Impersonate-User", "eve"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Extra-acme.com%2Fscope", "a"),
        ("Impersonate-Extra-acme.com%2Fscope", "b"),
    )


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"as-groups": ["a"]}, "as-groups needs as: .* together with a user"),
        ({"as": "eve", "as-groups": "admins"}, "as-groups must be a list of strings"),
        ({"as": "eve", "as-user-extra": {"scopes": "a"}}, "as-user-extra must be lists of strings by name"),
        ({"as": "eve\nX: 1"}, "a control character such as a line break"),
        ({"as": "eve", "as-groups": ["a\0"]}, "a control character"),
        ({"as": "eve", "as-uid": "\x7f"}, "a control character"),
        ({"as": "eve", "as-user-extra": {"scopes": ["a\rb"]}}, "a control character"),
    ],
)
async def test_whom_a_kubeconfig_acts_as_is_never_half_understood(
    tmp_path: Path, user: dict[str, Any], said: str
) -> None:
    files = with_user(config(tmp_path, current="there"), {"token": "t", **user})
    with pytest.raises(Misconfigured, match=said):
        await load_credentials(CredentialOptions(files))


@pytest.mark.parametrize("proxy", ["socks5://proxy:1080", "proxy:3128", "http://", "http://a:99999"])
async def test_a_proxy_that_cannot_be_used_is_named(tmp_path: Path, proxy: str) -> None:
    files = with_user(config(tmp_path, current="there"), {}, **{"proxy-url": proxy})
    with pytest.raises(Misconfigured, match=f"proxy-url is {proxy!r}; it must be a URL such as http://"):
        await load_credentials(CredentialOptions(files))


async def test_a_name_in_the_servers_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    files = with_user(config(tmp_path, current="there"), {}, **{"tls-server-name": 5})
    with pytest.raises(Misconfigured, match="tls-server-name is 5"):
        await load_credentials(CredentialOptions(files))


async def test_a_flag_cannot_bring_in_another_header(tmp_path: Path) -> None:
    files = with_user(config(tmp_path, current="there"), {"token": "t"})
    with pytest.raises(Misconfigured, match=r"--as and --as-group cannot be used: 'a\\nb'"):
        await load_credentials(CredentialOptions(files, user="eve", groups=("a\nb",)))
