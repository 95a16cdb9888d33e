"""The hook's process: a unix socket, a few connections, and an errand for each domain.

One thread and one selector, so that forking is safe. No peer can hold up another: nothing here waits for a
peer to send or to read, and a domain is pinned in a process of its own.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from kvplace.core.errors import GrpcStatus, Misconfigured
from kvplace.hook.errand import Errand, Outcome
from kvplace.hook.grpc import Call, GrpcConnection
from kvplace.hook.logs import log
from kvplace.hook.services import CallRefused, DefineDomain, Reply, answer, defined_domain
from kvplace.hook.surroundings import Surroundings

MAX_PEERS = 16
MAX_ERRANDS = 4
_BACKLOG = 128
_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 1 << 18
"""A peer that does not read what we send is not read from either."""
_FAREWELL_S = 1.0
"""How long whoever said Shutdown has to take the answer and hang up, which KubeVirt does at once."""

_LONGEST_SOCKET_PATH = 107  # sun_path of unix(7), less the closing NUL


def serve(around: Surroundings) -> None:
    """Answer until KubeVirt says Shutdown or SIGTERM comes; raises Misconfigured for want of a socket."""
    told_to_leave, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGTERM, _noted)
    with _listen(around) as listener:
        try:
            Server(listener, around, told_to_leave).run()
        finally:
            with suppress(OSError):
                os.unlink(around.socket)  # noqa: PTH108 - see surroundings


@dataclass(slots=True, eq=False)
class _Peer:
    socket: socket.socket
    grpc: GrpcConnection = field(default_factory=GrpcConnection)
    unsent: bytearray = field(default_factory=bytearray)
    errands: dict[int, tuple[Errand, DefineDomain]] = field(default_factory=dict)
    """Errands by the stream that waits for them."""
    reads: bool = True


class Server:
    """Answers on a listening socket, until it is asked to leave or `told_to_leave` becomes readable."""

    def __init__(self, listener: socket.socket, around: Surroundings, told_to_leave: int) -> None:
        self._listener = listener
        self._told_to_leave = told_to_leave
        self._around = around
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._leaving: _Peer | None = None
        self._leave_by = float("inf")

    def run(self) -> None:
        """Serve until Shutdown has been answered, or we are told to leave."""
        gc.freeze()  # what there is now stays for good, also in the children that share it
        gc.enable()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._welcome)
        self._selector.register(self._told_to_leave, selectors.EVENT_READ, self._leave_at_once)
        log("info", f"serving on {self._around.socket}", {"node": self._around.node})
        try:
            while not self._may_leave():
                for key, events in self._selector.select(self._patience()):
                    react: Callable[[int], None] = key.data
                    react(events)
                self._end_late_errands()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()

    def _may_leave(self) -> bool:
        hung_up = self._leaving is not None and self._leaving not in self._peers
        return hung_up or time.monotonic() >= self._leave_by

    def _leave_at_once(self, _: int) -> None:
        self._leave_by = 0.0

    def _patience(self) -> float | None:
        deadlines = [errand.deadline for peer in self._peers for errand, _ in peer.errands.values()]
        soonest = min([*deadlines, self._leave_by])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _welcome(self, _: int) -> None:
        try:
            accepted, _address = self._listener.accept()
        except OSError:
            return  # gone again before we looked
        accepted.setblocking(False)
        if len(self._peers) >= MAX_PEERS:
            idle = next((peer for peer in self._peers if not peer.errands), self._peers[0])
            log("warning", f"more than {MAX_PEERS} connections: the oldest idle one is closed")
            self._drop(idle)
        peer = _Peer(accepted)
        self._peers.append(peer)
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._attend, peer))
        self._flush(peer)

    def _attend(self, peer: _Peer, events: int) -> None:
        if peer not in self._peers:
            return  # dropped by an event before this one
        try:
            if events & selectors.EVENT_READ and not self._read(peer):
                self._drop(peer)
                return
            self._flush(peer)
        except Exception as error:
            log("error", f"a connection is closed because of {error!r}")
            self._drop(peer)

    def _read(self, peer: _Peer) -> bool:
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        for said in peer.grpc.receive(data):
            if isinstance(said, Call):
                self._answer(peer, said)
            elif said.stream in peer.errands:
                self._end_errand(peer, said.stream)
        return True

    def _answer(self, peer: _Peer, call: Call) -> None:
        try:
            said = answer(call.path, call.message)
        except CallRefused as refused:
            log("warning", f"a call is refused with {refused.status.name}: {refused}")
            peer.grpc.fail(call.stream, refused.status, str(refused))
            return
        match said:
            case Reply():
                peer.grpc.reply(call.stream, said.message)
                if said.last:
                    log("info", "KubeVirt says that the VM has ended; leaving")
                    self._leaving, self._leave_by = peer, time.monotonic() + _FAREWELL_S
            case DefineDomain():
                self._send_errand(peer, call.stream, said)

    def _send_errand(self, peer: _Peer, stream: int, asked: DefineDomain) -> None:
        if sum(len(other.errands) for other in self._peers) >= MAX_ERRANDS:
            sentence = f"{MAX_ERRANDS} domains are being pinned already; ask again"
            peer.grpc.fail(stream, GrpcStatus.UNAVAILABLE, sentence)
            return
        try:
            errand = Errand.send(partial(_pin, asked, self._around))
        except OSError as error:
            self._deliver(
                peer, stream, asked, Outcome(GrpcStatus.UNAVAILABLE, f"cannot fork: {error}".encode())
            )
            return
        peer.errands[stream] = (errand, asked)
        self._selector.register(errand.pipe, selectors.EVENT_READ, partial(self._hear, peer, stream))

    def _hear(self, peer: _Peer, stream: int, _: int) -> None:
        if stream not in peer.errands:
            return
        errand, asked = peer.errands[stream]
        if errand.listen():
            outcome = self._end_errand(peer, stream)
            self._deliver(peer, stream, asked, outcome)
            self._attend(peer, 0)

    def _end_errand(self, peer: _Peer, stream: int) -> Outcome:
        errand, _ = peer.errands.pop(stream)
        self._selector.unregister(errand.pipe)
        return errand.end()

    def _end_late_errands(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers):
            for stream, (errand, asked) in list(peer.errands.items()):
                if now >= errand.deadline:
                    self._deliver(peer, stream, asked, self._end_errand(peer, stream))
                    self._attend(peer, 0)

    def _deliver(self, peer: _Peer, stream: int, asked: DefineDomain, outcome: Outcome) -> None:
        if outcome.status is GrpcStatus.OK:
            peer.grpc.reply(stream, defined_domain(outcome.said))
        elif outcome.status is GrpcStatus.UNAVAILABLE and asked.domain_xml and _may_float(self._around):
            log(
                "warning", f"the VM starts unpinned, as its on-failure: float allows: {outcome.said.decode()}"
            )
            peer.grpc.reply(stream, defined_domain(asked.domain_xml))
        else:
            peer.grpc.fail(stream, outcome.status, outcome.said.decode())

    def _flush(self, peer: _Peer) -> None:
        output = peer.grpc.output()
        if peer.reads:
            peer.unsent += output
        try:
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # Nobody reads our answers any more. What was said before may still lie in the socket, a
            # Shutdown above all, so go on to the end of it.
            peer.unsent.clear()
            peer.reads = False
        if peer.grpc.closed and not peer.unsent:
            self._drop(peer)
            return
        events = selectors.EVENT_WRITE if peer.unsent else 0
        if len(peer.unsent) < _MAX_UNSENT_BYTES:
            events |= selectors.EVENT_READ
        self._selector.modify(peer.socket, events, partial(self._attend, peer))

    def _drop(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        for stream in list(peer.errands):
            self._end_errand(peer, stream)
        self._selector.unregister(peer.socket)
        with suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)  # a child may still hold a copy of it
        peer.socket.close()


def _pin(asked: DefineDomain, around: Surroundings) -> bytes:
    from kvplace.hook.define_domain import define_domain

    return define_domain(asked.domain_xml, asked.vmi, around)


def _may_float(around: Surroundings) -> bool:
    from kvplace.core.request import OnFailure
    from kvplace.hook.pod import on_failure_of_pod

    return on_failure_of_pod(around) is OnFailure.FLOAT


def _listen(around: Surroundings) -> socket.socket:
    """Open the socket where nobody looks and move it into place once it takes connections."""
    staged = f"{around.staging_folder}/{os.path.basename(around.socket)}"  # noqa: PTH119 - see surroundings
    if len(os.fsencode(staged)) > _LONGEST_SOCKET_PATH:
        raise Misconfigured(
            f"the socket's path {staged} is longer than {_LONGEST_SOCKET_PATH} bytes; "
            "shorten KVPLACE_HOOK_FOLDER"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(around.staging_folder, exist_ok=True)  # noqa: PTH103
        with suppress(FileNotFoundError):
            os.unlink(staged)  # noqa: PTH108
        listener.bind(staged)
        listener.listen(_BACKLOG)
        os.rename(staged, around.socket)  # noqa: PTH104
    except OSError as error:
        listener.close()
        raise Misconfigured(
            f"no socket can be made in {around.hook_folder}: {error}; KubeVirt mounts a writable folder there"
        ) from None
    return listener


def _noted(_: int, __: FrameType | None) -> None:
    """Do nothing with a signal here: it has been written to the pipe that the selector watches."""
