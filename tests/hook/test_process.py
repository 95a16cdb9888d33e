"""The hook as the container runs it: a process, its socket, and whoever calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import cpus_of
from kvplace.core.errors import GrpcStatus, Misconfigured
from kvplace.core.protobuf import bytes_field, read_bytes_fields
from kvplace.core.request import OnFailure, Policy
from kvplace.domainxml import rewrite
from kvplace.hook.pod import wait_until_ready
from kvplace.hook.process import PodEnvironment
from kvplace.hook.server import MAX_CLIENTS
from tests.hook.conftest import HookProcess
from tests.hook.grpc_client import CALLBACKS, DEFINE, INFO, SocketCaller, define, domain_of
from tests.hook.machine import DOMAIN, HERE, ON_THIS_MACHINE
from tests.kubevirt_documents import DOMAIN_FILES


@pytest.fixture
def serving(hook: HookProcess) -> HookProcess:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    return hook


def test_info_is_answered_before_there_is_any_placement(hook: HookProcess) -> None:
    hook.start()
    with SocketCaller(hook.socket) as caller:
        fields = read_bytes_fields(caller.ask(INFO).message)
    assert fields[1] == b"kvplace"
    assert fields[4] == b"v1alpha3"


def test_kubevirts_documents_are_pinned_over_three_chained_calls_on_connections_of_their_own(
    serving: HookProcess,
) -> None:
    for path in DOMAIN_FILES:
        xml, vmi = (
            path.read_bytes(),
            path.with_name(path.name.replace(".domain.xml", ".vmi.json")).read_bytes(),
        )
        answer = xml
        for _ in range(3):
            with SocketCaller(serving.socket) as caller:
                answer = domain_of(caller.ask(DEFINE, define(answer, vmi)).message)
        assert answer == rewrite(xml, ON_THIS_MACHINE)


def test_each_vcpu_gets_its_own_cpu_of_this_machine(hook: HookProcess) -> None:
    cpus = tuple(cpus_of(HERE))
    hook.pod.bind(replace(ON_THIS_MACHINE, policy=Policy.EXCLUSIVE, vcpus=cpus))
    hook.start()
    xml = f"<domain><vcpu>{len(cpus)}</vcpu></domain>".encode()
    with SocketCaller(hook.socket) as caller:
        answer = domain_of(caller.ask(DEFINE, define(xml)).message).decode()
    assert [f'<vcpupin vcpu="{vcpu}" cpuset="{cpu}"/>' in answer for vcpu, cpu in enumerate(cpus)] == [
        True
    ] * len(cpus)


def test_the_placement_is_read_at_each_call(hook: HookProcess) -> None:
    hook.start()
    with SocketCaller(hook.socket) as caller:
        waiting = caller.ask(DEFINE, define())
        assert waiting.status == GrpcStatus.FAILED_PRECONDITION
        assert "has neither the annotation kvplace.io/placement nor cpu-map yet" in waiting.sentence
        hook.pod.bind(ON_THIS_MACHINE)
        assert domain_of(caller.ask(DEFINE, define()).message) == rewrite(DOMAIN, ON_THIS_MACHINE)


def test_a_cpu_map_with_cpus_outside_the_cpuset_is_refused_and_named(hook: HookProcess) -> None:
    hook.pod.write("cpu-map", '{"socket0": ["9990", "9991", "9992", "9993"]}')
    hook.start()
    with SocketCaller(hook.socket) as caller:
        answer = caller.ask(DEFINE, define())
    assert answer.status == GrpcStatus.FAILED_PRECONDITION
    assert answer.sentence.startswith("CPU 9990-9993 of the placement is ")


def test_an_inherited_placement_leaves_the_domain_unchanged_with_float(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE, uid="somebody-else")
    hook.pod.ask_for(OnFailure.FLOAT)
    hook.start()
    with SocketCaller(hook.socket) as caller:
        assert domain_of(caller.ask(DEFINE, define()).message) == DOMAIN
    assert "inherited or copied" in json.loads(hook.next_log_line())["msg"]


@pytest.mark.parametrize(
    ("xml", "sentence"),
    [
        (b"", "is empty"),
        (b"<network/>", "not <domain>"),
        (b'<!DOCTYPE domain [<!ENTITY a "b">]><domain>&a;</domain>', "has a DOCTYPE"),
        (b"<domain>" + b" " * 3_000_000 + b"</domain>", "above the limit"),
    ],
)
def test_a_document_that_is_not_a_domain_is_refused_in_one_sentence(
    serving: HookProcess, xml: bytes, sentence: str
) -> None:
    with SocketCaller(serving.socket) as caller:
        answer = caller.ask(DEFINE, define(xml))
    assert answer.status == GrpcStatus.INVALID_ARGUMENT
    assert sentence in answer.sentence


def test_a_document_of_megabytes_passes_through_windows_of_64_kib(serving: HookProcess) -> None:
    xml = b"<domain><vcpu>1</vcpu><description>" + b"long " * 300_000 + b"</description></domain>"
    with SocketCaller(serving.socket) as caller:
        assert domain_of(caller.ask(DEFINE, define(xml)).message) == rewrite(xml, ON_THIS_MACHINE)


def test_unknown_and_oversized_and_broken_calls_are_refused_and_the_next_is_answered(
    serving: HookProcess,
) -> None:
    with SocketCaller(serving.socket) as caller:
        assert caller.ask("/kubevirt.hooks.v9.Callbacks/OnDefineDomain").status == GrpcStatus.UNIMPLEMENTED
        assert caller.ask(INFO, b"\xff").status == GrpcStatus.INVALID_ARGUMENT
        stream = caller.open(INFO, [("grpc-encoding", "gzip")])
        assert caller.wait(stream).status == GrpcStatus.UNIMPLEMENTED
        stream = caller.open(DEFINE)
        caller.http.send_data(stream, b"\0\x7f\0\0\0")
        assert caller.wait(stream).status == GrpcStatus.RESOURCE_EXHAUSTED
        assert caller.ask(INFO).status == GrpcStatus.OK


def test_cloud_init_passes_through_unchanged(serving: HookProcess) -> None:
    with SocketCaller(serving.socket) as caller:
        answer = caller.ask(CALLBACKS + "PreCloudInitIso", bytes_field(1, "a") + bytes_field(3, "b"))
    assert answer.message == bytes_field(1, "a") + bytes_field(3, "b")


def test_connections_do_not_delay_each_other(serving: HookProcess) -> None:
    with (
        SocketCaller(serving.socket) as stuck,
        SocketCaller(serving.socket) as slow,
        SocketCaller(serving.socket) as caller,
    ):
        stuck.open(DEFINE)
        stuck.flush()
        slow.acknowledge = False  # takes 64 KiB of its answer and no more
        xml = b"<domain><vcpu>1</vcpu><description>" + b"long " * 100_000 + b"</description></domain>"
        slow.call(DEFINE, define(xml))
        slow.flush()
        assert caller.ask(INFO).status == GrpcStatus.OK
        assert domain_of(caller.ask(DEFINE, define()).message) == rewrite(DOMAIN, ON_THIS_MACHINE)


def test_four_domains_at_once_are_pinned(serving: HookProcess) -> None:
    xml = b"<domain><vcpu>1</vcpu>" + b"<x a='1'/>" * 100_000 + b"</domain>"
    with SocketCaller(serving.socket) as caller:
        answers = [caller.wait(stream) for stream in [caller.call(DEFINE, define(xml)) for _ in range(4)]]
    assert {domain_of(answer.message) for answer in answers} == {rewrite(xml, ON_THIS_MACHINE)}


def test_clients_that_disconnect_leave_no_descriptor_and_no_child(serving: HookProcess) -> None:
    assert serving.process is not None
    before = len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir()))
    for number in range(30):
        caller = SocketCaller(serving.socket)
        caller.call(DEFINE, define()) if number % 3 else caller.open(DEFINE)
        if number % 2:
            caller.flush()
        else:
            caller.socket.sendall(caller.http.data_to_send()[: 10 + number * 5])
        caller.socket.close()
    with SocketCaller(serving.socket) as caller:
        assert caller.ask(DEFINE, define()).status == GrpcStatus.OK
        # Answering means that whoever vanished earlier has been noticed: their ends came first.
        after = len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir()))
    assert after <= before + 1
    children = Path(f"/proc/{serving.process.pid}/task/{serving.process.pid}/children").read_text()
    assert children == ""


def test_more_connections_than_the_limit_close_the_oldest_idle_one(serving: HookProcess) -> None:
    callers = [SocketCaller(serving.socket) for _ in range(MAX_CLIENTS + 1)]
    try:
        assert callers[-1].ask(INFO).status == GrpcStatus.OK
        assert callers[1].ask(INFO).status == GrpcStatus.OK
        while callers[0].socket.recv(1 << 16):
            pass
    finally:
        for caller in callers:
            caller.socket.close()


@pytest.fixture
def stuck(hook: HookProcess) -> HookProcess:
    """A hook whose children hang: they wait for a placement that nothing writes into the pipe."""
    placement = hook.pod.path / "placement"
    placement.unlink()
    os.mkfifo(placement)
    hook.pod.ask_for(OnFailure.WAIT)
    hook.start()
    return hook


def children_of(hook: HookProcess) -> list[int]:
    assert hook.process is not None
    text = Path(f"/proc/{hook.process.pid}/task/{hook.process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_a_killed_child_means_an_error_or_an_unchanged_domain_by_on_failure(
    stuck: HookProcess, on_failure: OnFailure
) -> None:
    stuck.pod.ask_for(on_failure)
    with SocketCaller(stuck.socket) as caller, SocketCaller(stuck.socket) as other:
        stream = caller.call(DEFINE, define())
        caller.flush()
        while not children_of(stuck):
            assert other.ask(INFO).status == GrpcStatus.OK
        os.kill(children_of(stuck)[0], signal.SIGKILL)
        answer = caller.wait(stream)
    if on_failure is OnFailure.FLOAT:
        assert domain_of(answer.message) == DOMAIN
        assert "starts unpinned" in stuck.next_log_line()
    else:
        assert answer.status == GrpcStatus.UNAVAILABLE
        assert "the process that pins ended with -9" in answer.sentence
    assert children_of(stuck) == []


def test_a_child_that_hangs_is_killed_before_kubevirts_timeout(stuck: HookProcess) -> None:
    with SocketCaller(stuck.socket) as caller, SocketCaller(stuck.socket) as other:
        stream = caller.call(DEFINE, define())
        caller.flush()
        assert other.ask(INFO).status == GrpcStatus.OK
        answer = caller.wait(stream)
    assert answer.status == GrpcStatus.UNAVAILABLE
    assert "longer than 8 seconds" in answer.sentence
    assert children_of(stuck) == []


def test_a_fifth_domain_while_four_are_being_pinned_is_unavailable(stuck: HookProcess) -> None:
    with SocketCaller(stuck.socket) as caller:
        for _ in range(4):
            caller.call(DEFINE, define())
        fifth = caller.ask(DEFINE, define())
        assert fifth.status == GrpcStatus.UNAVAILABLE
        assert "being pinned already; try again" in fifth.sentence
        assert len(children_of(stuck)) == 4


@pytest.mark.parametrize("how", ["hang up", "cancel"])
def test_the_child_of_a_client_that_has_left_is_killed(stuck: HookProcess, how: str) -> None:
    with SocketCaller(stuck.socket) as other:
        with SocketCaller(stuck.socket) as caller:
            stream = caller.call(DEFINE, define())
            caller.flush()
            while not children_of(stuck):
                assert other.ask(INFO).status == GrpcStatus.OK
            if how == "cancel":
                caller.http.reset_stream(stream, 8)
                assert caller.ask(INFO).status == GrpcStatus.OK
                assert children_of(stuck) == []
        while children_of(stuck):
            assert other.ask(INFO).status == GrpcStatus.OK


def test_sigterm_kills_hanging_children(stuck: HookProcess) -> None:
    assert stuck.process is not None
    with SocketCaller(stuck.socket) as caller, SocketCaller(stuck.socket) as other:
        caller.call(DEFINE, define())
        caller.flush()
        while not (children := children_of(stuck)):
            assert other.ask(INFO).status == GrpcStatus.OK
        stuck.process.send_signal(signal.SIGTERM)
        assert stuck.wait() == 0
    assert not Path(f"/proc/{children[0]}").exists()


def test_bytes_that_are_not_http2_end_only_their_own_connection(serving: HookProcess) -> None:
    with socket.socket(socket.AF_UNIX) as stranger, SocketCaller(serving.socket) as caller:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(str(serving.socket))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while stranger.recv(1 << 16):
            pass
        assert caller.ask(INFO).status == GrpcStatus.OK


def test_a_client_that_pings_and_never_reads_costs_limited_memory(serving: HookProcess) -> None:
    with SocketCaller(serving.socket) as pinger, SocketCaller(serving.socket) as caller:
        pinger.flush()
        pinger.socket.setblocking(False)
        ping = b"\0\0\x08\x06\0\0\0\0\0" + b"12345678"
        sent = 0
        for _ in range(400):
            try:
                sent += pinger.socket.send(ping * 4000)
            except BlockingIOError:
                # Its ends are full and the hook no longer reads: others are still served.
                assert caller.ask(INFO).status == GrpcStatus.OK
        assert sent < 400 * 4000 * len(ping)


def test_shutdown_is_answered_and_then_process_and_socket_are_gone(serving: HookProcess) -> None:
    with SocketCaller(serving.socket) as caller:
        assert caller.ask(CALLBACKS + "Shutdown").message == b""
    assert serving.wait() == 0
    assert not serving.socket.exists()


def test_a_shutdown_whose_caller_does_not_stay_for_the_answer_ends_the_process_too(
    serving: HookProcess,
) -> None:
    with SocketCaller(serving.socket) as caller:
        caller.call(CALLBACKS + "Shutdown", b"")
        caller.flush()
    assert serving.wait() == 0


def test_a_hook_that_the_kubelet_ends_answers_shutdown_and_goes_on_until_sigterm(hook: HookProcess) -> None:
    hook.environ["KVPLACE_STAYS_AFTER_SHUTDOWN"] = "true"
    hook.start()
    with SocketCaller(hook.socket) as caller:
        assert caller.ask(CALLBACKS + "Shutdown").message == b""
    # Its caller is gone by now, at which another hook ends.
    with SocketCaller(hook.socket) as caller:
        assert caller.ask(INFO).status == GrpcStatus.OK
    assert hook.process is not None
    hook.process.send_signal(signal.SIGTERM)
    assert hook.wait() == 0
    assert not hook.socket.exists()


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_the_process_with_0(serving: HookProcess, busy: bool) -> None:
    assert serving.process is not None
    with SocketCaller(serving.socket) as caller:
        if busy:
            caller.open(DEFINE)
            caller.flush()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait() == 0
    assert not serving.socket.exists()


def test_sigterm_during_the_start_ends_the_first_process_of_a_container(hook: HookProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    library = hook.root / "early/h2"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit('it went on')\n"
    )
    hook.environ["PYTHONPATH"] = f"{library.parent}:{hook.environ['PYTHONPATH']}"
    hook.program = ["unshare", "--pid", "--fork", *hook.program]
    ended = hook.run("serve")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_restarted_hook_takes_the_place_of_the_socket_that_the_last_one_left(serving: HookProcess) -> None:
    assert serving.process is not None
    serving.process.kill()
    serving.wait()
    assert serving.socket.exists()
    assert serving.process.stderr is not None
    serving.process.stderr.close()
    serving.start()
    with SocketCaller(serving.socket) as caller:
        assert caller.ask(INFO).status == GrpcStatus.OK


def test_virt_launcher_finds_only_the_socket(serving: HookProcess) -> None:
    assert [path.name for path in serving.socket.parent.iterdir() if not path.is_dir()] == [
        serving.socket.name
    ]
    assert list((serving.socket.parent / ".staging").iterdir()) == []


def test_log_lines_are_json_objects_that_name_vm_and_node(serving: HookProcess) -> None:
    with SocketCaller(serving.socket) as caller:
        caller.ask(DEFINE, define())
    line = json.loads(serving.next_log_line())
    assert {"ts", "level", "msg", "component", "vm", "node", "uid"} <= line.keys()
    assert line["vm"] == "ns/vm"


# The probe.


def test_ready_once_the_socket_is_there_and_the_placement_is_ours(hook: HookProcess) -> None:
    early = hook.run("ready", "--once")
    assert (early.returncode, early.stdout) == (1, "")
    assert "does not listen on" in early.stderr
    hook.start()
    unplaced = hook.run("ready", "--once")
    assert unplaced.returncode == 1
    assert "has neither the annotation" in unplaced.stderr
    hook.pod.bind(ON_THIS_MACHINE, uid="forged")
    assert "inherited or copied" in hook.run("ready", "--once").stderr
    hook.pod.bind(ON_THIS_MACHINE)
    placed = hook.run("ready")
    assert (placed.returncode, placed.stdout, placed.stderr) == (0, "", "")


def test_a_vm_that_may_float_does_not_wait_for_ever_for_a_placement_of_its_own(hook: HookProcess) -> None:
    env = PodEnvironment.of(hook.environ)
    hook.pod.ask_for(OnFailure.FLOAT)
    with pytest.raises(Misconfigured, match="does not listen"):
        wait_until_ready(env, 0)
    hook.start()
    wait_until_ready(env, 0)
    hook.pod.bind(ON_THIS_MACHINE, uid="forged")
    wait_until_ready(env, 0)
    with SocketCaller(hook.socket) as caller:
        assert domain_of(caller.ask(DEFINE, define()).message) == DOMAIN
    hook.pod.ask_for(OnFailure.WAIT)
    with pytest.raises(Misconfigured, match="inherited or copied"):
        wait_until_ready(env, 0)


def test_a_bare_cpu_map_is_ready_too(hook: HookProcess) -> None:
    hook.start()
    hook.pod.write("cpu-map", '{"socket0": ["0"]}')
    assert hook.run("ready", "--once").returncode == 0


def test_a_socket_without_an_answer_is_not_ready(serving: HookProcess) -> None:
    assert serving.process is not None
    serving.process.kill()
    serving.wait()
    refused = serving.run("ready", "--once")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1


# The command line.


def test_other_commands_are_explained(hook: HookProcess) -> None:
    wrong = hook.run("server")
    assert wrong.returncode == 2
    assert wrong.stderr == "kvplace-hook: no command 'server'; use serve, ready or --help\n"
    assert "kvplace-hook ready" in hook.run("--help").stdout
    assert hook.run("--version").stdout.startswith("kvplace-hook ")


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [("/proc/no", "cannot make a socket in /proc/no"), ("/tmp/" + "long" * 30, "is longer than 107 bytes")],
)
def test_a_folder_without_room_for_a_socket_is_one_sentence_and_exit_1(
    hook: HookProcess, folder: str, sentence: str
) -> None:
    hook.environ["KVPLACE_HOOK_FOLDER"] = folder
    failed = hook.run("serve")
    assert failed.returncode == 1
    assert sentence in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


# What it is made of.

NEVER = {"kubernetes", "pydantic", "asyncio", "aiohttp", "click", "rich", "msgspec", "yaml", "ssl", "grpc"}


def imported_by(statement: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


def test_the_server_imports_nothing_large_and_no_xml_library() -> None:
    modules = imported_by("import kvplace.hook.__main__, kvplace.hook.server")
    assert "h2.connection" in modules
    assert not modules & (NEVER | {"lxml", "lxml.etree", "ctypes", "argparse"})


def test_a_child_imports_the_xml_library_and_nothing_else_that_is_large() -> None:
    modules = imported_by("import kvplace.hook.server, kvplace.hook.define_domain, kvplace.domainxml")
    assert "lxml.etree" in modules
    assert not modules & NEVER


def test_the_probe_imports_neither_http_nor_xml() -> None:
    modules = imported_by("import kvplace.hook.__main__, kvplace.hook.pod")
    assert "kvplace.core.placement" in modules
    assert not modules & (
        NEVER | {"h2", "h2.connection", "hpack", "lxml", "lxml.etree", "ctypes", "argparse", "logging"}
    )
