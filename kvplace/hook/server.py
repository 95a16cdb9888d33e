"""The hook's process: a unix socket, a few connections, and a child process for each domain.

One thread and one selector, so that forking is safe. No client can delay another: nothing here blocks on a
client, and a domain is pinned in a process of its own.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from kvplace.core.errors import GrpcStatus, Misconfigured
from kvplace.hook.arrivals import ArrivalPipes
from kvplace.hook.grpc import GrpcCall, GrpcConnection
from kvplace.hook.process import ChildProcess, Outcome, PodEnvironment, log
from kvplace.hook.services import CallRefused, DefineDomain, Reply, answer, defined_domain

MAX_CLIENTS = 16
MAX_CHILDREN = 4
_BACKLOG = 128
_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 1 << 18
"""A client that does not read its answers is not read from either."""
_SHUTDOWN_GRACE_S = 1.0
"""How long the client that called Shutdown may take to close, which KubeVirt does at once."""

_LONGEST_SOCKET_PATH = 107  # sun_path of unix(7), less the closing NUL


def serve(env: PodEnvironment) -> None:
    """Answer until SIGTERM comes, or KubeVirt calls Shutdown where nothing else ends this container.

    Raises Misconfigured when it cannot listen.
    """
    stop_pipe, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, _handled_by_selector)
    with ExitStack() as sockets:
        arriving = ArrivalPipes.open(env)
        if arriving is not None:
            sockets.enter_context(closing(arriving))
        # The last thing: virt-launcher starts libvirt as soon as it sees this socket.
        listener = sockets.enter_context(_listen(env))
        try:
            Server(listener, env, stop_pipe, arriving).run()
        finally:
            with suppress(OSError):
                os.unlink(env.socket)  # noqa: PTH108 - see process


@dataclass(slots=True, eq=False)
class _Client:
    socket: socket.socket
    grpc: GrpcConnection = field(default_factory=GrpcConnection)
    unsent: bytearray = field(default_factory=bytearray)
    children: dict[int, int] = field(default_factory=dict)
    """The pipe of a child process, by the stream that waits for its outcome."""
    reads_answers: bool = True


class Server:
    """Answers on a listening socket until `stop_pipe` is readable, or Shutdown ends a hook that may end."""

    def __init__(
        self,
        listener: socket.socket,
        env: PodEnvironment,
        stop_pipe: int,
        arriving: ArrivalPipes | None = None,
    ) -> None:
        """Through `arriving` come domains that migrate here."""
        self._listener = listener
        self._arriving = arriving
        self._children: dict[int, tuple[ChildProcess, Callable[[Outcome], None]]] = {}
        """Child processes by their pipe, and what is done with the outcome of each."""
        self._stop_pipe = stop_pipe
        self._env = env
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._shutdown_client: _Client | None = None
        self._stop_at = float("inf")

    def run(self) -> None:
        """Serve until the stop pipe is readable, or Shutdown was answered by a hook that may end."""
        gc.freeze()  # objects of the start stay for good, also in the children that share their pages
        gc.enable()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self._arriving is not None:
            self._await_arrival(self._arriving)
        self._selector.register(self._stop_pipe, selectors.EVENT_READ, self._stop_at_once)
        log("info", f"serving on {self._env.socket}", {"node": self._env.node})
        try:
            while not self._may_stop():
                for key, events in self._selector.select(self._select_timeout()):
                    callback: Callable[[int], None] = key.data
                    callback(events)
                self._end_late_children()
        finally:
            for client in list(self._clients):
                self._drop(client)
            for pipe in list(self._children):
                self._finish_child(pipe)
            self._selector.close()

    def _may_stop(self) -> bool:
        closed = self._shutdown_client is not None and self._shutdown_client not in self._clients
        return closed or time.monotonic() >= self._stop_at

    def _stop_at_once(self, _: int) -> None:
        self._stop_at = 0.0

    def _select_timeout(self) -> float | None:
        deadlines = [child.deadline for child, _ in self._children.values()]
        soonest = min([*deadlines, self._stop_at])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _accept(self, _: int) -> None:
        try:
            accepted, _address = self._listener.accept()
        except OSError:
            return  # the client has closed already
        accepted.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS:
            idle = next((client for client in self._clients if not client.children), self._clients[0])
            log("warning", f"more than {MAX_CLIENTS} connections: closing the oldest idle one")
            self._drop(idle)
        client = _Client(accepted)
        self._clients.append(client)
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._serve, client))
        self._flush(client)

    def _serve(self, client: _Client, events: int) -> None:
        if client not in self._clients:
            return  # dropped by an earlier event
        try:
            if events & selectors.EVENT_READ and not self._read(client):
                self._drop(client)
                return
            self._flush(client)
        except Exception as error:
            log("error", f"connection closed because of {error!r}")
            self._drop(client)

    def _read(self, client: _Client) -> bool:
        try:
            data = client.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        for event in client.grpc.receive(data):
            if isinstance(event, GrpcCall):
                self._answer(client, event)
            elif event.stream in client.children:
                self._end_child(client.children.pop(event.stream))
        return True

    def _answer(self, client: _Client, call: GrpcCall) -> None:
        try:
            request = answer(call.path, call.message)
        except CallRefused as refused:
            log("warning", f"call refused with {refused.status.name}: {refused}")
            client.grpc.fail(call.stream, refused.status, str(refused))
            return
        match request:
            case Reply():
                client.grpc.reply(call.stream, request.message)
                if request.last:
                    then = "the kubelet ends this container" if self._env.stays else "stopping"
                    log("info", f"KubeVirt called Shutdown because the VM has ended; {then}")
                if request.last and not self._env.stays:
                    self._shutdown_client, self._stop_at = client, time.monotonic() + _SHUTDOWN_GRACE_S
            case DefineDomain():
                self._define(client, call.stream, request)

    def _define(self, client: _Client, stream: int, asked: DefineDomain) -> None:
        if self._is_full():
            sentence = f"{MAX_CHILDREN} domains are being pinned already; try again"
            client.grpc.fail(stream, GrpcStatus.UNAVAILABLE, sentence)
            return
        try:
            client.children[stream] = self._start_child(
                partial(_pin, asked, self._env), partial(self._defined, client, stream, asked)
            )
        except OSError as error:
            self._reply(
                client, stream, asked, Outcome(GrpcStatus.UNAVAILABLE, f"cannot fork: {error}".encode())
            )

    def _defined(self, client: _Client, stream: int, asked: DefineDomain, outcome: Outcome) -> None:
        del client.children[stream]
        self._reply(client, stream, asked, outcome)
        self._serve(client, 0)

    def _await_arrival(self, arriving: ArrivalPipes) -> None:
        self._selector.register(arriving.domain, selectors.EVENT_READ, partial(self._start_arrival, arriving))

    def _start_arrival(self, arriving: ArrivalPipes, _: int) -> None:
        self._selector.unregister(arriving.domain)  # its child reads it
        if not self._is_full():
            try:
                self._start_child(partial(arriving.answer, self._env), partial(self._arrived, arriving))
                return
            except OSError as error:
                log("error", f"a VM that migrates here keeps the pins of its source: cannot fork: {error}")
        # No answer: the VM keeps the pins that it comes with.
        arriving.reopen()
        self._await_arrival(arriving)

    def _arrived(self, arriving: ArrivalPipes, outcome: Outcome) -> None:
        arriving.reopen()
        self._await_arrival(arriving)
        if outcome.status is not GrpcStatus.OK:
            sentence = outcome.output.decode()
            log("error", f"a VM that migrates here keeps the pins of its source: {sentence}")

    def _is_full(self) -> bool:
        return len(self._children) >= MAX_CHILDREN

    def _start_child(self, work: Callable[[], bytes], then: Callable[[Outcome], None]) -> int:
        """Start a child and return its pipe; raises OSError when there can be no more processes."""
        child = ChildProcess.start(work)
        self._children[child.pipe] = child, then
        self._selector.register(child.pipe, selectors.EVENT_READ, partial(self._read_child, child.pipe))
        return child.pipe

    def _read_child(self, pipe: int, _: int) -> None:
        if pipe in self._children and self._children[pipe][0].read():
            self._finish_child(pipe)

    def _finish_child(self, pipe: int) -> None:
        _, then = self._children[pipe]
        then(self._end_child(pipe))

    def _end_child(self, pipe: int) -> Outcome:
        self._selector.unregister(pipe)
        child, _ = self._children.pop(pipe)
        return child.end()

    def _end_late_children(self) -> None:
        now = time.monotonic()
        for pipe, (child, _) in list(self._children.items()):
            if now >= child.deadline and pipe in self._children:  # the end of another one may end it
                self._finish_child(pipe)

    def _reply(self, client: _Client, stream: int, asked: DefineDomain, outcome: Outcome) -> None:
        if outcome.status is GrpcStatus.OK:
            client.grpc.reply(stream, defined_domain(outcome.output))
        elif outcome.status is GrpcStatus.UNAVAILABLE and asked.domain_xml and _may_float(self._env):
            log(
                "warning",
                f"the VM starts unpinned, as its on-failure: float allows: {outcome.output.decode()}",
            )
            client.grpc.reply(stream, defined_domain(asked.domain_xml))
        else:
            client.grpc.fail(stream, outcome.status, outcome.output.decode())

    def _flush(self, client: _Client) -> None:
        output = client.grpc.output()
        if client.reads_answers:
            client.unsent += output
        try:
            while client.unsent:
                del client.unsent[: client.socket.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The client no longer reads. A call that it sent before may still be in the socket, a
            # Shutdown above all, so read to the end of it.
            client.unsent.clear()
            client.reads_answers = False
        if client.grpc.closed and not client.unsent:
            self._drop(client)
            return
        events = selectors.EVENT_WRITE if client.unsent else 0
        if len(client.unsent) < _MAX_UNSENT_BYTES:
            events |= selectors.EVENT_READ
        self._selector.modify(client.socket, events, partial(self._serve, client))

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        for pipe in client.children.values():
            self._end_child(pipe)
        client.children.clear()
        self._selector.unregister(client.socket)
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_RDWR)  # a child may still have it open
        client.socket.close()


def _pin(asked: DefineDomain, env: PodEnvironment) -> bytes:
    from kvplace.hook.define_domain import define_domain

    return define_domain(asked.domain_xml, asked.vmi, env)


def _may_float(env: PodEnvironment) -> bool:
    from kvplace.core.request import OnFailure
    from kvplace.hook.pod import on_failure_of_pod

    return on_failure_of_pod(env) is OnFailure.FLOAT


def _listen(env: PodEnvironment) -> socket.socket:
    """Make the socket in a staging folder and move it into place once it accepts connections."""
    staged = f"{env.staging_folder}/{os.path.basename(env.socket)}"  # noqa: PTH119 - see process
    if len(os.fsencode(staged)) > _LONGEST_SOCKET_PATH:
        raise Misconfigured(
            f"the socket's path {staged} is longer than {_LONGEST_SOCKET_PATH} bytes; "
            "shorten KVPLACE_HOOK_FOLDER"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(env.staging_folder, exist_ok=True)  # noqa: PTH103
        with suppress(FileNotFoundError):
            os.unlink(staged)  # noqa: PTH108
        listener.bind(staged)
        listener.listen(_BACKLOG)
        os.rename(staged, env.socket)  # noqa: PTH104
    except OSError as error:
        listener.close()
        raise Misconfigured(
            f"cannot make a socket in {env.hook_folder}: {error}; KubeVirt mounts a writable folder there"
        ) from None
    return listener


def _handled_by_selector(_: int, __: FrameType | None) -> None:
    """Do nothing here: the signal has been written to the pipe that the selector watches."""
