"""Devices as the podresources socket states them, and sockets that state nothing of use."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.grpc_server import GrpcServer
from harness.waiting import PATIENCE_S
from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.node_devices import NO_NUMA, DeviceCount, PodDevice
from kvplace.core.protobuf import BadMessage
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.kubelet.pod_resources import (
    count_devices,
    devices_of_pod,
    read_devices,
    read_pod_resources,
)
from tests.kubelet.played_kubelet import PlayedKubelet

VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/GA100")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[PlayedKubelet]:
    with PlayedKubelet(tmp_path / "kubelet.sock") as played:
        yield played


async def counts(tmp_path: Path) -> list[DeviceCount]:
    allocatable, pods = await read_pod_resources(tmp_path / "kubelet.sock")
    return count_devices(allocatable, pods)


async def test_free_devices_are_those_that_no_pod_has(kubelet: PlayedKubelet, tmp_path: Path) -> None:
    vfs: dict[str, list[int] | None] = {f"0000:c1:00.{number}": [number % 2] for number in range(6)}
    kubelet.devices = {VF: vfs, GPU: {"17": [1], "18": None}}
    kubelet.pods = {("vms", "launcher-a"): {VF: {"0000:c1:00.0": [0], "0000:c1:00.1": [1]}}, ("x", "y"): {}}
    assert await counts(tmp_path) == [
        DeviceCount(VF, NumaId(0), 3, 2),
        DeviceCount(VF, NumaId(1), 3, 2),
        DeviceCount(GPU, NO_NUMA, 1, 1),
        DeviceCount(GPU, NumaId(1), 1, 1),
    ]
    _, pods = await read_pod_resources(tmp_path / "kubelet.sock")
    assert [(pod.namespace, pod.name) for pod in pods] == [("vms", "launcher-a")]
    assert devices_of_pod(pods[0]) == (
        PodDevice(VF, NumaId(0), "0000:c1:00.0"),
        PodDevice(VF, NumaId(1), "0000:c1:00.1"),
    )


async def test_a_device_on_several_numa_nodes_is_one_device(kubelet: PlayedKubelet, tmp_path: Path) -> None:
    kubelet.devices = {GPU: {"17": [3, 1], "18": [3]}}
    assert await counts(tmp_path) == [DeviceCount(GPU, NumaId(1), 1, 1), DeviceCount(GPU, NumaId(3), 1, 1)]


async def test_counters_of_kubevirt_are_left_out(kubelet: PlayedKubelet, tmp_path: Path) -> None:
    kubelet.devices = {
        "devices.kubevirt.io/kvm": {"kvm1": None, "kvm2": None},
        "devices.kubevirt.io/nvme": {"9": [0]},
    }
    assert await counts(tmp_path) == [DeviceCount(ResourceName("devices.kubevirt.io/nvme"), NumaId(0), 1, 1)]


async def test_an_answer_of_many_devices_is_read_whole(kubelet: PlayedKubelet, tmp_path: Path) -> None:
    kubelet.devices = {VF: {f"0000:c1:{number:02x}.0": [1] for number in range(1000)}}
    assert await counts(tmp_path) == [DeviceCount(VF, NumaId(1), 1000, 1000)]


async def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"kubelet\.sock does not answer: No such file"):
        await counts(tmp_path)


async def test_a_socket_that_hangs_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "kubelet.sock"))
        hanging.listen()
        with pytest.raises(Unavailable, match=r"did not answer /v1.PodResourcesLister/List in 0\.2 s"):
            await read_pod_resources(tmp_path / "kubelet.sock", deadline_s=0.2)


@pytest.mark.parametrize(
    "junk", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\1" * 100, b""], ids=["HTTP/1", "junk", "end"]
)
async def test_a_socket_that_speaks_something_else_is_given_up(tmp_path: Path, junk: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(junk)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "kubelet.sock")
    with pytest.raises(Unavailable, match=r"kubelet\.sock"):
        await read_pod_resources(tmp_path / "kubelet.sock", deadline_s=PATIENCE_S)
    server.close()


async def test_a_server_without_podresources_is_named(tmp_path: Path) -> None:
    with (
        GrpcServer(tmp_path / "kubelet.sock", {}),
        pytest.raises(Unavailable, match=r"PodResourcesLister/List: .*gRPC status 12"),
    ):
        await read_pod_resources(tmp_path / "kubelet.sock")


async def test_a_message_that_is_none_is_refused(tmp_path: Path) -> None:
    methods = {
        "/v1.PodResourcesLister/List": lambda _: b"\x0a\x05abc",
        "/v1.PodResourcesLister/GetAllocatableResources": lambda _: b"",
    }
    with (
        GrpcServer(tmp_path / "kubelet.sock", methods),
        pytest.raises(Unavailable, match="an answer that podresources does not define: field 1"),
    ):
        await read_pod_resources(tmp_path / "kubelet.sock")


async def test_an_endless_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplace.kubelet.pod_resources._MOST_BYTES", 1000)
    methods = {"/v1.PodResourcesLister/List": lambda _: b"\0" * 5000}
    with (
        GrpcServer(tmp_path / "kubelet.sock", methods),
        pytest.raises(Unavailable, match="longer than 1000 bytes"),
    ):
        await read_pod_resources(tmp_path / "kubelet.sock")


@given(st.binary(max_size=200))
def test_any_bytes_are_devices_or_refused(junk: bytes) -> None:
    try:
        found = read_devices(junk, 1)
    except (BadMessage, UnicodeDecodeError):
        return
    assert len(found) <= len(junk)


async def test_every_failure_is_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "kubelet.sock").write_text("a file")
    with pytest.raises(KvplaceError):
        await counts(tmp_path)
