"""A libvirt in the hand of a tenant costs the agent no more than is reported, whatever it answers."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import pytest

from harness.waiting import PATIENCE_S
from kvplace.agent.libvirt_pins import LibvirtFailed, LibvirtPins
from kvplace.core.cpuset import mask_of
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.libvirt.pinning_process import MOST_MEMORY

GUEST, ID = "hostile", UUID("7a5e2a7f-0d4b-4b6f-9b61-1c6a0c1b7e11")
BESIDE_PRIVATE_MEMORY = 48 << 20
"""Code of Python and libvirt, which all processes of a node share."""
MEASURED = """
import resource, subprocess, sys
patience_s = float(sys.argv[1])
child = subprocess.Popen([sys.executable, *sys.argv[2:]])
try:
    child.wait(patience_s)
except subprocess.TimeoutExpired:
    child.kill()
    child.wait()
print(" ", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
"""
"""Runs Python for so long and prints its memory: the kernel counts the small process that starts it, too."""
OPEN, LOOKUP, FEATURE, AUTH_LIST, VCPU_PINS, EMULATOR_PIN = 1, 24, 60, 66, 230, 280
NODE_INFO, PERSISTENT, NODE_CPU_MAP, DOMAIN_INFO, MAX_VCPUS = 6, 148, 293, 16, 18
PROGRAM, REPLY, EVENT = 0x20008086, 1, 2

PINS = DomainPins(vcpus={0: mask_of([0]), 1: mask_of([0])}, emulator=mask_of([0]))
WITH_LITTLE_CPU_TIME = """
import json, sys
from kvplace.libvirt import pinning_process
pinning_process._MOST_CPU_S = 1
pinning_process.limit_resources()
print(pinning_process.answer_to(json.loads(sys.stdin.readline())))
"""

Answer = Callable[[socket.socket, int, int], None]
"""The answer of a libvirt to the call of a number and serial."""


def packet(call: int, serial: int, body: bytes, *, kind: int = REPLY) -> bytes:
    header = struct.pack(">7I", 28 + len(body), PROGRAM, 1, call, kind, serial, 0)
    return header + body


def honest(peer: socket.socket, call: int, serial: int) -> None:
    """Answers as libvirt does until the domain is found."""
    name = struct.pack(">I", len(GUEST)) + GUEST.encode() + bytes(-len(GUEST) % 4)
    bodies = {
        OPEN: b"",
        FEATURE: struct.pack(">I", 0),
        AUTH_LIST: struct.pack(">II", 1, 0),
        EMULATOR_PIN: struct.pack(">III", 1, 0, 1),
        VCPU_PINS: struct.pack(">II", 0, 0),
        MAX_VCPUS: struct.pack(">I", 2),
        LOOKUP: name + ID.bytes + struct.pack(">I", 1),
        PERSISTENT: struct.pack(">I", 0),
    }
    peer.sendall(packet(call, serial, bodies.get(call, struct.pack(">I", 0))))


def claims_many_cpus(peer: socket.socket, call: int, serial: int) -> None:
    """Answers every question about sizes with the largest that the protocol can state."""
    most = 2**31 - 1
    if call == VCPU_PINS:
        peer.sendall(packet(call, serial, struct.pack(">II", 0, most)))
    elif call == MAX_VCPUS:
        peer.sendall(packet(call, serial, struct.pack(">I", most)))
    elif call == NODE_CPU_MAP:
        peer.sendall(packet(call, serial, struct.pack(">IIII", 1, 0, most, most)))
    elif call == DOMAIN_INFO:
        peer.sendall(packet(call, serial, struct.pack(">IQQIQ", 1, 1, 1, 60_000, 1)))
    elif call == NODE_INFO:
        peer.sendall(packet(call, serial, bytes(32) + struct.pack(">Q6I", 1, most, 1, 1, 1, most, 1)))
    else:
        honest(peer, call, serial)


def sends_large_maps(peer: socket.socket, call: int, serial: int) -> None:
    """Sends pins of 30 MiB."""
    if call in {VCPU_PINS, EMULATOR_PIN, NODE_CPU_MAP}:
        size = 30 << 20
        peer.sendall(packet(call, serial, struct.pack(">I", size) + bytes(size) + struct.pack(">I", 1)))
    else:
        honest(peer, call, serial)


def sends_events(peer: socket.socket, call: int, serial: int) -> None:
    """Sends events of 1 MiB, one after another, instead of an answer."""
    if call in {VCPU_PINS, NODE_CPU_MAP}:
        for _ in range(2000):
            peer.sendall(packet(318, 0, bytes(1 << 20), kind=EVENT))
    else:
        honest(peer, call, serial)


def sends_events_for_ever(peer: socket.socket, call: int, serial: int) -> None:
    """Sends small events without an end instead of the first answer."""
    assert call
    while True:
        peer.sendall(packet(318, 0, b"", kind=EVENT) * 1000)


def answers_byte_by_byte(peer: socket.socket, call: int, serial: int) -> None:
    """Sends one byte of a long answer every 50 ms."""
    assert call
    for byte in packet(FEATURE, serial, bytes(1 << 20)):
        peer.sendall(bytes([byte]))
        time.sleep(0.05)


@contextmanager
def listening(folder: Path, answer: Answer) -> Iterator[Path]:
    """A libvirt that answers one client."""
    path = folder / "virtqemud-sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            try:
                peer, _ = listener.accept()
            except OSError:
                return  # its client was given up before it came
            with peer, suppress(OSError), peer.makefile("rb") as calls:
                while length := calls.read(4):
                    call = calls.read(struct.unpack(">I", length)[0] - 4)
                    _, _, number, _, serial, _ = struct.unpack(">6I", call[:24])
                    answer(peer, number, serial)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def qemu() -> Iterator[int]:
    """A process with the command line of a QEMU."""
    code = "import sys; sys.stdin.read()"
    command = (sys.executable, "-c", code, "-name", f"guest={GUEST}", "-uuid", str(ID))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate()


def asked(folder: Path, answer: Answer, *, patience_s: float = PATIENCE_S) -> tuple[dict[str, object], int]:
    """Asks a libvirt for pins; returns the answer and the most memory that asking took."""
    command = (sys.executable, "-c", MEASURED, str(patience_s), "-m", "kvplace.libvirt.pinning_process")
    with listening(folder, answer) as path, qemu() as pid:
        request = {"pid": pid, "socket": str(path).lstrip("/"), "pins": PINS.document()}
        done = subprocess.run(
            command, input=json.dumps(request).encode() + b"\n", stdout=subprocess.PIPE, check=True
        )
    said, _, kibibytes = done.stdout.rstrip().rpartition(b" ")
    return json.loads(said.strip() or b"{}"), int(kibibytes) << 10


@pytest.mark.parametrize("answer", [claims_many_cpus, sends_large_maps, sends_events])
def test_a_libvirt_that_reports_huge_sizes_costs_no_more_than_the_stated_memory(
    answer: Answer, tmp_path: Path
) -> None:
    said, memory = asked(tmp_path, answer, patience_s=2)  # the agent waits for 5 s
    assert "changed" not in said
    assert memory <= MOST_MEMORY + BESIDE_PRIVATE_MEMORY


def test_a_libvirt_that_has_no_pins_yet_takes_them(tmp_path: Path) -> None:
    assert asked(tmp_path, honest)[0] == {"changed": 3}


def test_the_process_that_talks_to_a_libvirt_has_bounds_and_no_rights_on_the_node(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    limits: list[str] = []

    def looks_at_its_client(peer: socket.socket, call: int, serial: int) -> None:
        if call == LOOKUP:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", credentials)[0]
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found.update((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
            lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
            limits.extend(" ".join(line.split()) for line in lines)
        honest(peer, call, serial)

    asked(tmp_path, looks_at_its_client)
    assert {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert "0" not in (*found["Uid"].split(), *found["Gid"].split())
    assert (found["Groups"], found["NoNewPrivs"]) == ("", "1")
    bounds = {
        f"Max data size {MOST_MEMORY} {MOST_MEMORY} bytes",
        "Max cpu time 5 5 seconds",
        "Max file size 0 0 bytes",
        "Max processes 0 0 processes",
        "Max open files 64 64 files",
    }
    assert bounds <= set(limits)


def test_a_libvirt_that_never_comes_to_an_answer_costs_bounded_cpu_time(tmp_path: Path) -> None:
    """Also when the process goes on after the end of the agent."""
    with listening(tmp_path, sends_events_for_ever) as path, qemu() as pid:
        request = {"pid": pid, "socket": str(path).lstrip("/"), "pins": PINS.document()}
        done = subprocess.run(
            (sys.executable, "-c", WITH_LITTLE_CPU_TIME),
            input=json.dumps(request).encode() + b"\n",
            stdout=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize("answer", [sends_events_for_ever, answers_byte_by_byte])
async def test_a_libvirt_that_never_comes_to_an_answer_is_given_up_with_its_process(
    answer: Answer, tmp_path: Path
) -> None:
    with listening(tmp_path, answer) as path, qemu() as pid:
        began = time.monotonic()
        with pytest.raises(LibvirtFailed, match=r"did not answer within 0\.7 s"):
            await LibvirtPins(socket=str(path).lstrip("/"), answer_within_s=0.7).pin(pid, PINS)
        assert time.monotonic() - began < 5  # `listening` waits until its client has gone
