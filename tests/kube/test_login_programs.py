"""Login programs of kubeconfigs (`exec`): their input, their answers, and that they can ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured
from kvplace.kube.credentials import CredentialOptions, Credentials, load_credentials
from tests.cli.calls import COMMAND
from tests.cli.terminal import Terminal

VERSION = "client.authentication.k8s.io/v1"


def kubeconfig(
    folder: Path,
    program: str,
    *,
    server: str = "https://one:6443",
    user: dict[str, Any] | None = None,
    **settings: Any,
) -> str:
    """Write a kubeconfig whose user logs in with a Python program."""
    (folder / "login.py").write_text(f"import json, os, sys, time\n{program}\n")
    login = {"apiVersion": VERSION, "command": sys.executable, "args": [str(folder / "login.py")], **settings}
    cluster = {"server": server}
    if server.startswith("https"):
        (folder / "ca.crt").write_bytes(Certificates.issue(folder).ours.file.read_bytes())
        cluster["certificate-authority"] = str(folder / "ca.crt")
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user or {"exec": login}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    path = folder / "config"
    path.write_text(json.dumps(document))
    return str(path)


def answering(status: str) -> str:
    """Write a program that answers with a status, a Python expression."""
    return f"print(json.dumps(dict(apiVersion={VERSION!r}, kind='ExecCredential', status={status})))"


TOKEN = answering("dict(token='issued')")


async def load(path: str) -> Credentials:
    return await load_credentials(CredentialOptions(path))


async def test_an_answer_with_token_and_certificate_gives_both_and_leaves_no_key_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    certificate, key = Certificates.issue(tmp_path).ours.issue("me")
    status = (
        f"dict(token='issued', clientCertificateData=open({str(certificate)!r}).read(), "
        f"clientKeyData=open({str(key)!r}).read())"
    )
    loaded: list[tuple[str, ...]] = []
    original = __import__("ssl").SSLContext.load_cert_chain

    def load_cert_chain(self: Any, *files: str, **more: Any) -> None:
        loaded.append(tuple(Path(file).read_text() for file in files))
        original(self, *files, **more)

    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", load_cert_chain)
    found = await load(kubeconfig(tmp_path, answering(status)))
    assert await found.authorization() == "Bearer issued"
    assert loaded == [(certificate.read_text() + "\n" + key.read_text(),)]
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_a_program_that_states_much_on_stderr_does_not_stop_the_command(tmp_path: Path) -> None:
    found = await load(kubeconfig(tmp_path, f"sys.stderr.write('x' * 1_000_000)\n{TOKEN}"))
    assert await found.authorization() == "Bearer issued"


async def test_a_program_is_informed_of_its_cluster_where_it_wants_that(tmp_path: Path) -> None:
    tell = "status = json.loads(os.environ['KUBERNETES_EXEC_INFO'])['spec'].get('cluster', {})\n"
    program = tell + answering(
        "dict(token=f\"{status.get('server')},{'certificate-authority-data' in status}\")"
    )
    told = await load(kubeconfig(tmp_path, program, provideClusterInfo=True))
    assert await told.authorization() == "Bearer https://one:6443,True"
    untold = await load(kubeconfig(tmp_path, program))
    assert await untold.authorization() == "Bearer None,False"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (answering("{}"), "it answers with neither a token nor a certificate"),
        (answering("dict(clientCertificateData='x')"), "it answers with a certificate without its key"),
        (answering("'none'"), "gives no credentials: "),
        (answering("dict(clientKeyData='x')"), "it answers with neither a token nor a certificate"),
        (answering("dict(token='x', clientKeyData='x')"), "or a key without its certificate"),
        (answering("dict(token=5)"), "must be strings"),
        ("print('[')", "its answer is not valid JSON"),
        ("os.write(1, b'\\xff')", "its answer is not valid JSON"),
        ("print('[]')", "its answer has not the apiVersion"),
        (
            "print(json.dumps(dict(apiVersion='v0', kind='x', status={})))",
            "its answer has not the apiVersion",
        ),
        ("sys.exit(3)", "it ended with exit code 3, and reports on stderr$"),
        ("os.kill(os.getpid(), 9)", "it ended with exit code -9"),
        (answering("dict(token='a\\nb')"), "its token contains"),
    ],
)
async def test_a_wrong_answer_is_one_sentence_that_names_the_program(
    tmp_path: Path, program: str, said: str
) -> None:
    path = kubeconfig(tmp_path, program)
    with pytest.raises(Misconfigured, match=rf"context 'here' of kubeconfig .*config cannot be used.*{said}"):
        await load(path)


@pytest.mark.parametrize(
    "login", [{}, [], "login", {"command": "x"}, {"apiVersion": VERSION}, {"command": 5}]
)
async def test_an_entry_of_another_form_is_one_sentence(tmp_path: Path, login: Any) -> None:
    path = kubeconfig(tmp_path, TOKEN, user={"exec": login})
    with pytest.raises(Misconfigured, match="context 'here' of kubeconfig"):
        await load(path)


async def test_a_program_that_is_not_installed_is_named_with_the_hint_of_its_author(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, TOKEN, command="no-such-login", installHint="Install it with apt.")
    with pytest.raises(
        Misconfigured, match=r"'no-such-login' .* No such file or directory. Install it with apt"
    ):
        await load(path)


@pytest.mark.parametrize(
    ("mode", "stdin", "interactive"),
    [
        ("Never", "terminal", False),
        ("IfAvailable", "terminal", True),
        ("Always", "terminal", True),
        (None, "terminal", True),
        ("Never", "pipe", False),
        ("IfAvailable", "pipe", False),
    ],
)
def test_a_program_reads_stdin_where_it_may_and_stdin_is_a_terminal(
    tmp_path: Path, mode: str | None, stdin: str, interactive: bool
) -> None:
    tell = "spec = json.loads(os.environ['KUBERNETES_EXEC_INFO'])['spec']\n"
    tell += "sys.stderr.write(f\"told {spec['interactive']}, terminal {os.isatty(0)}, read\")\n"
    tell += "sys.stderr.write(' nothing' if os.isatty(0) else f' {sys.stdin.read()!r}')\nsys.exit(1)"
    path = kubeconfig(tmp_path, tell, interactiveMode=mode)
    read, write = os.openpty() if stdin == "terminal" else os.pipe()
    if stdin == "pipe":
        os.write(write, b"requests\n")
    done = subprocess.run(
        [*COMMAND, "get", "vms", "--kubeconfig", path],
        stdin=write if stdin == "terminal" else read,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    os.close(read)
    os.close(write)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "told True, terminal True, read nothing" if interactive else "told False, terminal False, read ''"
    )


@pytest.mark.parametrize(
    ("mode", "said"),
    [("Always", "interactiveMode is Always, and stdin is not a terminal"), ("always", "must be Never, IfAv")],
)
async def test_a_program_that_must_ask_is_not_started_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    path = kubeconfig(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')\n{TOKEN}", interactiveMode=mode)
    with pytest.raises(Misconfigured, match=said):
        await load(path)
    assert not (tmp_path / "started").exists()


def test_on_a_terminal_the_program_asks_and_reads_the_answer(tmp_path: Path) -> None:
    ask = "sys.stderr.write('Code from your phone: ')\nsys.stderr.flush()\ncode = sys.stdin.readline()\n"
    say = f"sys.stderr.write(f'got {{code.strip()}}\\n')\n{TOKEN}"
    path = kubeconfig(tmp_path, ask + say, server="http://127.0.0.1:1")
    with Terminal([*COMMAND, "get", "vms", "--kubeconfig", path], {}) as terminal:
        terminal.read_until("Code from your phone:")
        terminal.type("424242\n")
        terminal.read_until("got 424242")
        terminal.read_until("does not answer")
        assert terminal.end() == 1


def test_prompts_appear_and_are_answered_while_stdout_is_a_pipe(tmp_path: Path) -> None:
    ask = "sys.stderr.write('x' * 1_000_000 + 'Open https://login and type AB12: ')\nsys.stderr.flush()\n"
    say = f"sys.stderr.write(f'got {{sys.stdin.readline().strip()}}\\n')\n{TOKEN}"
    path = kubeconfig(tmp_path, ask + say, server="http://127.0.0.1:1")
    with Terminal([*COMMAND, "get", "vms", "-o", "json", "--kubeconfig", path], {}, piped=True) as terminal:
        terminal.read_until("type AB12:")
        terminal.type("yes\n")
        terminal.read_until("got yes")
        terminal.read_until("does not answer")
        assert terminal.end() == 1


@pytest.mark.parametrize("piped", [False, True])
def test_ctrl_c_ends_the_command_at_once_while_the_program_ignores_it(tmp_path: Path, piped: bool) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    wait = ignore + "sys.stderr.write('waiting\\n')\nsys.stderr.flush()\ntime.sleep(600)\n"
    path = kubeconfig(tmp_path, wait, server="http://127.0.0.1:1")
    with Terminal([*COMMAND, "get", "vms", "--kubeconfig", path], {}, piped=piped) as terminal:
        terminal.read_until("waiting")
        terminal.interrupt()
        assert terminal.end() == 130


def test_a_signal_ends_a_command_in_a_pipe_and_its_program_that_waits(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wait = f"pipe = open({str(pipe)!r}, 'w', buffering=1)\npipe.write('waits\\n')\ntime.sleep(600)\n"
    path = kubeconfig(tmp_path, wait, server="http://127.0.0.1:1")
    with (
        subprocess.Popen(
            [*COMMAND, "get", "vms", "--kubeconfig", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as command,
        pipe.open() as reading,
    ):
        assert reading.readline() == "waits\n"
        command.terminate()
        assert command.wait(PATIENCE_S) == 130
        assert reading.read() == "", "a pipe ends with the last process that holds it"
