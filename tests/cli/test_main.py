"""Rules of every command: streams, exit codes, errors of one sentence, quick help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvplace import __version__
from kvplace.cli.main import COMMANDS
from tests.cli.calls import COMMAND, Caller, call_process, on_a_terminal
from tests.cli.terminal import wait_until_it_sleeps

NOT_FOR_OFFLINE_WORK = ("kubernetes", "aiohttp", "pydantic", "h2", "libvirt")


def test_help_names_every_command_and_every_exit_code(kvplace: Caller) -> None:
    called = kvplace("--help")
    assert called.code == 0
    assert all(f"\n  {command} " in called.out for command in COMMANDS)
    assert all(code in called.out for code in ("3  does not fit", "4  partly done", "130  interrupted"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_purpose(kvplace: Caller, command: str) -> None:
    called = kvplace(command, "--help")
    assert called.code == 0
    assert called.out.startswith(f"Usage: kvplace {command}")


def test_the_version_is_printed(kvplace: Caller) -> None:
    assert kvplace("--version").out == f"kvplace {__version__}\n"


def test_without_a_command_the_help_goes_to_stderr_as_wrong_usage(kvplace: Caller) -> None:
    called = kvplace()
    assert (called.code, called.out) == (2, "")
    assert "Commands:" in called.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mapp"], "no such command 'mapp'; did you mean 'map'?"),
        (["xyz"], "no such command 'xyz'"),
        (
            ["rollout", "statu"],
            "no such command 'statu'; did you mean 'status'? (see",
        ),
        (["place"], "--topology is missing"),
        (
            ["place", "--topology", "epyc-7502p", "vm.yaml"],
            "(vm.yaml); name a manifest with -f (see",
        ),
        (["map", "epyc-7502p", "vm.yaml"], "argument (vm.yaml) (see"),
        (["map", "epyc-7502p", "--leger", "x"], "no such option '--leger'"),
        (["map", "epyc-7502p", "--placement", "x"], "'--placement'; did you mean '--placements'? (see"),
        (
            ["get"],
            "vms|nodes is missing; choose vms, vm, vmis, vmi, nodes or node (see `kvplace get --help`)",
        ),
        (["get", "nods"], "invalid value for 'vms|nodes': 'nods' is not one of"),
        (["describe-node"], "is missing (see"),
        (
            ["topology", "vax"],
            "there is no file 'vax', and no server type is called 'vax'; there are: 2x",
        ),
        (["topology", "./none.json"], "none.json does not exist"),
        (["topology", "epyc-7502p", "--reserved", "0-"], "--reserved: the CPU list '0-'"),
        (
            ["topology", "epyc-7502p", "--reserved", "640"],
            "reserved names CPUs that the machine does not have: 640",
        ),
        (["place", "--topology", "epyc-7502p", "--free", "60-70"], "--free: the machine has no CPU 64-70"),
        (["demo", "--vms", "0"], "0 is not in the range"),
        (["serve"], "is missing (see"),
        (["demo", "-o", "name"], "'name' is not one of 'table', 'wide', 'json', 'yaml'"),
        (["rewrite", "--domain", "-"], "give either --placement or --cpu-map"),
    ],
)
def test_a_users_mistake_is_one_sentence_on_stderr_and_exit_code_2(
    kvplace: Caller, arguments: list[str], words: str
) -> None:
    called = kvplace(*arguments)
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("kvplace: ")
    assert called.err.count("\n") == 1
    assert words in called.err


def test_an_invalid_address_of_serve_is_one_sentence(kvplace: Caller, tmp_path: Path) -> None:
    files = [f"--{name}={tmp_path / name}" for name in ("tls-cert", "tls-key", "client-ca")]
    called = kvplace("serve", *files, "--sidecar-image=hook:1", "--extender-address=8443")
    assert called.code == 2
    assert "'8443' is not an address; write HOST:PORT" in called.err


def test_commands_without_a_cluster_load_no_client() -> None:
    program = (
        "import sys; from kvplace.cli.main import main\n"
        "def run(*words):\n"
        "    try: main(words)\n"
        "    except SystemExit as left: assert left.code == 0, (words, left.code)\n"
        "run('--help'); run('topology'); run('map', 'epyc-7502p'); run('place', '--topology', 'epyc-7502p')\n"
        "run('demo', '--vms', '3', '--nodes', '2')\n"
        f"print([name for name in {NOT_FOR_OFFLINE_WORK!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="", capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_loads_only_the_command_line_and_core() -> None:
    program = (
        "import sys; from kvplace.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = [name for name in sys.modules if name.startswith('kvplace.')]\n"
        "others = [name for name in loaded if not name.startswith(('kvplace.cli', 'kvplace.core'))]\n"
        "print(others, 'rich' in sys.modules or 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] False"


def test_as_a_kubectl_plugin_its_errors_name_kubectl_kvplace(tmp_path: Path) -> None:
    plugin = tmp_path / "kubectl-kvplace"
    plugin.write_text(f"#!{sys.executable}\nfrom kvplace.cli.main import main\nmain()\n", encoding="utf-8")
    plugin.chmod(0o755)
    done = subprocess.run([plugin, "place"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "(see `kubectl kvplace place --help`)" in done.stderr


def test_an_interruption_while_modules_load_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    project = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), project])}
    command = [sys.executable, "-m", "kvplace", "topology"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_closed_pipe_is_not_an_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "topology", "2x-epyc-7763-nps4", "-o", "json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "is_answered"),
    [
        (("plan", "--requests", "nowhere"), 2, False),
        (("place", "--topology", "epyc-7502p"), 0, False),
        (("map", "epyc-7502p", "--placements", "-"), 0, True),
        (("rollout",), 2, False),
    ],
)
def test_messages_that_no_client_can_read_change_neither_answer_nor_exit_code(
    arguments: tuple[str, ...], code: int, *, is_answered: bool
) -> None:
    line = '{"released": "nobody"}\n' if "map" in arguments else ""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], input=line, stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert done.returncode == code
    assert bool(done.stdout) == is_answered


def test_an_interrupt_exits_with_130_and_without_a_traceback() -> None:
    with subprocess.Popen(
        [*COMMAND, "place", "--topology", "epyc-7502p", "-o", "json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b'{"vcpus": 1}\n')
        process.stdin.flush()
        assert b"placement" in process.stdout.readline()
        wait_until_it_sleeps(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert b"Traceback" not in process.stderr.read()


def test_colours_are_printed_on_a_terminal_without_no_color_only() -> None:
    coloured = on_a_terminal("map", "epyc-7502p")
    assert "\x1b[2m" in coloured
    plain = call_process("map", "epyc-7502p").out
    assert "\x1b" not in plain
    assert "\x1b[3" not in on_a_terminal("demo", "--vms", "3", "--nodes", "1", NO_COLOR="1")
