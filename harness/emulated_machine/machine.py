"""One emulated machine that runs, and calls into it."""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import SocketIO
from typing import ParamSpec, TypeVar

from harness.emulated_machine.channel import Answer, Call, Message, Ready, receive, send
from harness.emulated_machine.initramfs import HOST_ADDRESS, MOUNT_TAG
from harness.emulated_machine.kernels import Boot, Kernel, fetched
from harness.emulated_machine.shape import Shape

P = ParamSpec("P")
R = TypeVar("R")

PROJECT = Path(__file__).resolve().parent.parent.parent
_BOOT_S = 120.0
_GRACE_S = 30.0
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 cgroup_no_v1=all "
    # Services that a machine for a minute does not need, and emulation makes slow.
    "mitigations=off audit=0 lsm= init_on_alloc=0 no5lvl nowatchdog no_timer_check tsc=reliable "
    "cryptomgr.notests rcupdate.rcu_expedited=1 "
    # Would move memory by itself while a test checks its place.
    "numa_balancing=disable"
)


class MachineDied(Exception):
    """The machine did not come up, or went away; the message ends with its console."""


class CallFailed(Exception):
    """A call raised inside the machine; the message has the traceback and its output."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ran inside."""

    exit_code: int
    stdout: str
    stderr: str


class EmulatedMachine:
    """A machine of the given shape, with this machine's files and a copy-on-write view of them."""

    def __init__(self, shape: Shape, kernel: Kernel, folder: Path, qemu: subprocess.Popen[bytes]) -> None:
        self.shape = shape
        self.kernel = kernel
        self._folder = folder
        self._qemu = qemu

    def connect(self, listener: socket.socket) -> None:
        """Wait until the machine takes calls."""
        with selectors.DefaultSelector() as selector, _end_of(self._qemu) as ended:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            if listener not in [key.fileobj for key, _ in selector.select(_BOOT_S)]:
                raise self._died("did not start")
        self._connection, _ = listener.accept()
        self._channel = SocketIO(self._connection, "rw")
        message = self._receive(_BOOT_S)
        assert isinstance(message, Ready)
        self.release = message.release
        """The kernel's, such as `6.1.0-56-amd64`."""

    def disconnect(self) -> None:
        """Close the channel."""
        self._connection.close()

    def call(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a module's function inside, as root, in a process of its own; at most three minutes.

        Arguments and answer are pickled. Raises CallFailed with the traceback and all output.
        """
        return self.call_within(180.0, function, *arguments, **named)

    def call_within(
        self, timeout_s: float, function: Callable[P, R], *arguments: P.args, **named: P.kwargs
    ) -> R:
        """Call with another limit."""
        answer = self._ask(Call(pickle.dumps((function, arguments, named)), timeout_s), timeout_s + _GRACE_S)
        if answer.value is None:
            raise CallFailed(
                f"{function.__module__}.{function.__qualname__} inside {self.shape.name}: {answer.failure}\n"
                f"{answer.output}"
            )
        value: R = pickle.loads(answer.value)
        return value

    def run(self, *command: str | Path) -> Finished:
        """Run a command inside, with any exit code; at most three minutes."""
        return self.run_within(180.0, *command)

    def run_within(self, timeout_s: float, *command: str | Path, folder: Path = Path("/")) -> Finished:
        """Run a command with another limit, and in a folder."""
        return self.call_within(timeout_s, run_command, [str(word) for word in command], folder)

    def output_of(self, *command: str | Path) -> str:
        """Run a command inside that must end with 0, and give its standard output."""
        finished = self.run(*command)
        if finished.exit_code != 0:
            raise CallFailed(f"{command} inside {self.shape.name} ended with {finished}")
        return finished.stdout

    def _ask(self, call: Call, timeout_s: float) -> Answer:
        send(self._channel, call)
        answer = self._receive(timeout_s)
        assert isinstance(answer, Answer)
        return answer

    def _receive(self, timeout_s: float) -> Message:
        self._connection.settimeout(timeout_s)
        try:
            message = receive(self._channel)
        except TimeoutError:
            message = None
        if message is None:
            raise self._died("does not answer")
        return message

    def _died(self, how: str) -> MachineDied:
        try:
            how += f", and QEMU ended with {self._qemu.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            how += ", and QEMU still runs"
        said = (self._folder / "qemu.log").read_text(errors="replace")
        console = self._folder / "console.log"
        lines = console.read_text(errors="replace").splitlines()[-40:] if console.exists() else []
        return MachineDied(
            f"the machine {self.shape.name} {how}. {said}\nIts console ends with:\n" + "\n".join(lines)
        )


@contextmanager
def _end_of(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """Give a descriptor that can be read once a process has ended."""
    descriptor = os.pidfd_open(process.pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def run_command(command: list[str], folder: Path) -> Finished:
    """Run a command; called inside."""
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    return Finished(finished.returncode, finished.stdout, finished.stderr)


@contextmanager
def emulated_machine(shape: Shape, kernel: Kernel = Kernel.V6_1) -> Iterator[EmulatedMachine]:
    """Boot a machine, which takes 4 to 12 s, and switch it off at the end.

    Raises NoMachineHere where that cannot be, MachineDied with the console where it does not come up.
    """
    boot = fetched(kernel)
    with ExitStack() as leave:
        folder = Path(leave.enter_context(tempfile.TemporaryDirectory(prefix="kvplace-machine-")))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "channel"))
            listener.listen(1)
            with (folder / "qemu.log").open("wb") as log:
                qemu = subprocess.Popen(
                    list(_command(shape, boot, folder)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            leave.callback(_end, qemu)
            machine = EmulatedMachine(shape, kernel, folder, qemu)
            machine.connect(listener)
        leave.callback(machine.disconnect)
        yield machine


def _end(qemu: subprocess.Popen[bytes]) -> None:
    qemu.kill()
    qemu.wait()


def _command(shape: Shape, boot: Boot, folder: Path) -> Iterator[str]:
    # QEMU has no wish of its own to end with its starter.
    yield from ("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64")
    # One thread for all CPUs: on few cores quicker than one for each, and free of QEMU's races between them.
    yield from ("-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=single")
    yield from shape.qemu_arguments()
    yield from ("-nodefaults", "-no-user-config", "-no-reboot", "-nographic", "-monitor", "none")
    yield from ("-serial", f"file:{folder}/console.log")
    yield from ("-chardev", f"socket,id=channel,path={folder}/channel")
    yield from ("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=channel,name=kvplace")
    yield from ("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap")
    yield from ("-device", f"virtio-9p-pci,fsdev=root,mount_tag={MOUNT_TAG}")
    yield from ("-netdev", f"user,id=net,net={HOST_ADDRESS}/24,host={HOST_ADDRESS},ipv6=off,restrict=off")
    yield from ("-device", "virtio-net-pci,netdev=net,romfile=")
    yield from shape.device_arguments()
    yield from ("-kernel", str(boot.kernel), "-initrd", str(boot.initramfs))
    yield from ("-append", " ".join(_kernel_arguments(shape)))


def _kernel_arguments(shape: Shape) -> Iterator[str]:
    yield _KERNEL_ARGUMENTS
    yield shape.kernel_arguments
    # The kernel gives unknown parameters to the first process as environment.
    yield f"KVPLACE_PYTHON={sys.executable}"
    yield f"PYTHONPATH={PROJECT}"
    if data := os.environ.get("KVPLACE_CAPTURED_DATA"):
        yield f"KVPLACE_CAPTURED_DATA={data}"
