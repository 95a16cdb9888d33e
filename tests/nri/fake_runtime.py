"""A container runtime's end of NRI, played by a test step by step."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from struct import unpack

from tests.nri import wire

LONGEST_FRAME = 4096
"""A real runtime stops answering after a longer one."""


@asynccontextmanager
async def fake_runtime() -> AsyncIterator[FakeRuntime]:
    # Not below tmp_path: the name of a test may make it longer than a socket's path may be.
    with tempfile.TemporaryDirectory(prefix="nri") as folder:
        runtime = FakeRuntime(Path(folder) / "nri.sock")
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()


class FakeRuntime:
    """Listens; a test takes the plugins that connect one by one."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._connected: asyncio.Queue[PluginEnd] = asyncio.Queue()
        self._ends: list[PluginEnd] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.socket)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up_all()
        await self._server.wait_closed()
        self.socket.unlink(missing_ok=True)

    async def plugin(self) -> PluginEnd:
        """Wait for the next plugin that connects."""
        return await self._connected.get()

    async def ready_plugin(
        self, pods: Sequence[bytes] = (), containers: Sequence[bytes] = ()
    ) -> tuple[PluginEnd, bytes]:
        """Take a plugin through everything before its first event; also returns its synchronization."""
        end = await self.plugin()
        await end.register()
        await end.configure()
        return end, await end.synchronize(pods, containers)

    def hang_up_all(self) -> None:
        for end in self._ends:
            end.hang_up()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = PluginEnd(reader, writer)
        self._ends.append(end)
        self._connected.put_nowait(end)


class PluginEnd:
    """The runtime's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._streams = count(1, 2)
        self._received = {wire.PLUGIN: b"", wire.RUNTIME: b""}

    async def register(self) -> tuple[str, str]:
        """Answer RegisterPlugin; returns name and index."""
        method, payload = await self.take_call()
        assert method == "RegisterPlugin"
        return wire.at(payload, 1).decode(), wire.at(payload, 2).decode()

    async def configure(self, **timeouts: int) -> int:
        """Call Configure; returns the mask of events."""
        request: wire.Fields = {
            1: "",
            2: "containerd",
            3: "v2.2.9",
            4: 5000,
            5: timeouts.get("request_ms", 2000),
        }
        mask = wire.fields(await self.call("Configure", wire.message(request)))[2][0]
        assert isinstance(mask, int)
        return mask

    async def synchronize(
        self, pods: Sequence[bytes] = (), containers: Sequence[bytes] = (), *, more: bool = False
    ) -> bytes:
        request: wire.Fields = {1: list(pods), 2: list(containers), 3: int(more)}
        return await self.call("Synchronize", wire.message(request))

    async def call(self, method: str, payload: bytes = b"") -> bytes:
        """Call the plugin; returns the payload of its answer, which must be a good one."""
        answer = wire.fields(await self.response(method, payload))
        assert 1 not in answer, f"{method} failed: {answer[1]!r}"
        result = answer.get(2, [b""])[0]
        assert isinstance(result, bytes)
        return result

    async def response(
        self, method: str, payload: bytes, service: str = "nri.pkg.api.v1alpha1.Plugin"
    ) -> bytes:
        """Call the plugin; returns the whole ttrpc response."""
        stream = next(self._streams)
        request = wire.message({1: service, 2: method, 3: payload, 4: 1_990_000_000})
        self.send(wire.frames(wire.PLUGIN, wire.ttrpc(stream, wire.REQUEST, request)))
        answered, kind, body = await self.message(wire.PLUGIN)
        assert (answered, kind) == (stream, wire.RESPONSE)
        return body

    async def take_call(self, answer: Mapping[int, wire.Value] | None = None) -> tuple[str, bytes]:
        """Wait for a call of the plugin and answer it; returns its method and payload."""
        stream, kind, body = await self.message(wire.RUNTIME)
        assert kind == wire.REQUEST
        assert wire.at(body, 1) == b"nri.pkg.api.v1alpha1.Runtime"
        response = wire.message(answer or {})
        self.send(wire.frames(wire.RUNTIME, wire.ttrpc(stream, wire.RESPONSE, response)))
        return wire.at(body, 2).decode(), wire.at(body, 3)

    async def message(self, channel: int) -> tuple[int, int, bytes]:
        """Wait for a whole message on one channel: stream, type, body."""
        while True:
            data = self._received[channel]
            if len(data) >= 10:
                length, stream, kind, flags = unpack(">IIBB", data[:10])
                if len(data) >= 10 + length:
                    assert flags == 0
                    self._received[channel] = data[10 + length :]
                    return stream, kind, data[10 : 10 + length]
            found, size = unpack(">II", await self.reader.readexactly(8))
            assert size <= LONGEST_FRAME
            self._received[found] += await self.reader.readexactly(size)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def hang_up(self) -> None:
        self.writer.close()


def pod(uid: str, *, annotations: Mapping[str, str] | None = None, name: str = "p") -> bytes:
    """Write a PodSandbox with more fields than a plugin reads."""
    written: wire.Fields = {
        1: f"sandbox-{uid}",
        2: name,
        3: uid,
        4: "default",
        7: "runc",
        9: 4711,
        10: "10.0.0.7",
    }
    return wire.message({**written, 5: wire.entries({"app": "x"}), 6: wire.entries(annotations or {})})


def container(
    name: str, *, uid: str = "u", cpus: str = "", mems: str = "", state: int = 3, pid: int = 0
) -> bytes:
    """Write a Container with more fields than a plugin reads."""
    cpu = wire.message({1: wire.message({1: 102}), 6: cpus, 7: mems})
    linux = wire.message({3: wire.message({1: b"", 2: cpu}), 5: f"/kubepods/{name}"})
    mounts = [wire.message({1: f"/mnt/{number}", 2: "bind", 4: ["ro", "rbind"]}) for number in range(3)]
    written: wire.Fields = {
        1: f"id-{name}",
        2: f"sandbox-{uid}",
        3: name,
        4: state,
        8: ["PATH=/bin", "A=\u00e4"],
    }
    cdi = [wire.message({1: "intel.com/vf=a"})]
    return wire.message(
        {**written, 8: ["A=1", "B="], 9: mounts, 11: linux, 20: cdi, 12: pid, 14: 1_700_000_000}
    )


SUBJECT = wire.message({1: pod("u"), 2: container("c", cpus="0-3", mems="1", pid=42)})
"""The fields of a call about a container."""


def updates_in(answer: bytes, field: int = 1) -> list[tuple[str, str, str, int]]:
    """Container, CPUs, memory nodes and ignore_failure of each update in an answer."""
    found = []
    for update in wire.fields(answer).get(field, []):
        assert isinstance(update, bytes)
        ignored = wire.fields(update).get(3, [0])[0]
        assert isinstance(ignored, int)
        cpu = wire.at(update, 2, 1, 2)
        cpus, mems = wire.at(cpu, 6).decode(), wire.at(cpu, 7).decode()
        found.append((wire.at(update, 1).decode(), cpus, mems, ignored))
    return found
