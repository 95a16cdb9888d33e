"""The agent's report about devices, from a played kubelet to the published objects."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.agent import devices as agent_devices
from kvplace.agent.devices import (
    MOST_GIVEN,
    DeviceWatch,
    given_devices,
    numa_nodes_of,
    with_addresses,
)
from kvplace.agent.node_plan import GivenDevice, NodeContainer, NodePlan
from kvplace.agent.node_report import NodeReport
from kvplace.core.node_devices import NO_NUMA, DeviceCount, PodDevice, TopologyPolicy
from kvplace.core.scalars import NumaId, PodUid, ResourceName
from kvplace.kube.object_records import PodRecord
from kvplace.service.process import in_background
from tests.agent.hosts import CONFIG, NODE, Host
from tests.agent.nodes_in_use import container
from tests.agent.publishing_agent import Agent, publishing
from tests.kube.faulty_cluster import FaultyCluster
from tests.kubelet.played_kubelet import PlayedKubelet

VF = ResourceName("intel.com/vf")
POD = PodRecord("vms", "launcher-a", PodUid("u1"), node=NODE, placement="{}")


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as root:  # the path of a socket has at most 107 bytes
        host = Host(Path(root))
        host.write(CONFIG, "topologyManagerPolicy: best-effort")
        for folder in ("pod-resources", "device-plugins"):
            (host.root / "var/lib/kubelet" / folder).mkdir()
        yield host


@pytest.fixture
def kubelet(host: Host) -> Iterator[PlayedKubelet]:
    with PlayedKubelet(host.root / "var/lib/kubelet/pod-resources/kubelet.sock") as played:
        played.devices = {VF: {"0000:c1:00.1": [1], "0000:c1:00.2": [1], "0000:01:00.1": [0]}}
        yield played


class Containers:
    """The containers that a runtime has reported."""

    def __init__(self) -> None:
        self.plan = NodePlan()
        self.known: list[NodeContainer] = []
        self._listeners: list[Callable[[], None]] = []

    def containers(self) -> list[NodeContainer]:
        return self.known

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def report(self, *known: NodeContainer) -> None:
        self.known = list(known)
        for listener in self._listeners:
            listener()


@pytest.fixture
def containers() -> Containers:
    return Containers()


@pytest.fixture
async def agent(host: Host, containers: Containers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    """Publish the devices of a host; the kubelet is read only after a change."""
    monkeypatch.setattr(agent_devices, "READ_EVERY_S", 3600.0)
    cluster = FaultyCluster()
    cluster.create_node(NODE)
    async with publishing(host, cluster) as agent:
        watch = DeviceWatch(host.settings(), agent.own, containers, agent.machine, agent.report)
        async with in_background(watch.run()):
            yield agent


def why_unknown(agent: Agent) -> str | None:
    return agent.report.devices_unknown


def free(agent: Agent) -> list[int]:
    devices = agent.status.devices
    return [] if devices is None else [one.free for one in devices.devices.counts]


async def test_devices_are_published_with_the_policy_and_as_resources_of_zones(
    kubelet: PlayedKubelet, agent: Agent
) -> None:
    await agent.until(lambda: free(agent) == [1, 2])
    published = agent.status.devices
    assert published is not None
    assert published.devices.counts == (
        DeviceCount(VF, NumaId(0), 1, 1),
        DeviceCount(VF, NumaId(1), 2, 2),
    )
    assert published.devices.policy == TopologyPolicy("best-effort", "container")
    await agent.until(lambda: agent.zones()["node-1"].get(VF) == ("2", "2", "2"))
    assert agent.condition("DevicesKnown").status
    assert "intel.com/vf" in agent.condition("DevicesKnown").message


async def test_a_device_that_a_pod_gets_is_published_at_once_and_leaves_the_fingerprint(
    kubelet: PlayedKubelet, agent: Agent, host: Host
) -> None:
    await agent.until(lambda: free(agent) == [1, 2])
    topology, generation = agent.topology.topology, agent.topology.generation
    assert topology is not None
    agent.own.pods._records[POD.uid] = POD  # as watched
    kubelet.pods = {
        ("vms", "launcher-a"): {VF: {"0000:c1:00.1": [1]}},
        ("vms", "b"): {VF: {"0000:01:00.1": [0]}},
    }
    host.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{}")

    await agent.until(lambda: free(agent) == [0, 1])

    published = agent.status.devices
    assert published is not None
    assert published.pods == {PodUid("u1"): (PodDevice(VF, NumaId(1), "0000:c1:00.1"),)}
    kubelet.devices = {}
    host.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{ }")
    await agent.until(lambda: agent.condition("DevicesKnown").message == "the node has no devices")
    assert agent.topology.topology is not None
    assert agent.topology.topology.fingerprint == topology.fingerprint
    assert agent.topology.generation == generation


async def test_the_address_of_a_device_that_the_kubelet_lists_by_its_group_is_that_in_the_containers_variable(
    kubelet: PlayedKubelet, agent: Agent, host: Host, containers: Containers
) -> None:
    """KubeVirt's device plugin lists IOMMU groups."""
    gpu, address = ResourceName("nvidia.com/GP102.gl"), "0000:c1:00.0"
    kubelet.devices = {gpu: {"17": [0]}}
    kubelet.pods = {("vms", "launcher-a"): {gpu: {"17": [0]}}}
    host.write(f"sys/bus/pci/devices/{address}/numa_node", "1")
    agent.own.pods._records[POD.uid] = POD  # as watched
    variables = (f"PCI_RESOURCE_NVIDIA_COM_GP102_GL={address}",)
    devices = given_devices(variables, ())
    containers.report(replace(container(POD.uid), devices=devices))

    def published() -> tuple[PodDevice, ...]:
        report = agent.status.devices
        return () if report is None else report.pods.get(POD.uid, ())

    await agent.until(lambda: published() == (PodDevice(gpu, NumaId(1), address),))


async def test_a_node_without_podresources_has_unknown_devices_and_is_ready(agent: Agent) -> None:
    await agent.until(lambda: agent.condition("DevicesKnown").reason == "DevicesUnknown")
    assert "kubelet.sock does not answer" in agent.condition("DevicesKnown").message
    assert agent.status.devices is None
    assert "DevicesKnown" not in agent.condition("Ready").message


async def test_the_last_answer_of_the_kubelet_counts_while_it_restarts_for_at_most_a_minute(
    kubelet: PlayedKubelet, agent: Agent, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.until(lambda: free(agent) == [1, 2])
    kubelet.stop()
    watch = DeviceWatch(host.settings(), agent.own, Containers(), agent.machine, NodeReport())
    watch._report = agent.report
    watch._read_at = asyncio.get_running_loop().time()
    await watch.read()
    assert why_unknown(agent) == ""
    monkeypatch.setattr(agent_devices, "_KEEP_S", -1.0)
    await watch.read()
    assert "kubelet.sock" in (why_unknown(agent) or "")
    await agent.until(lambda: agent.condition("DevicesKnown").reason == "DevicesUnknown")


async def test_equal_devices_are_not_written_again(kubelet: PlayedKubelet, agent: Agent, host: Host) -> None:
    await agent.until(lambda: free(agent) == [1, 2] and agent.topology.devices == agent.status.devices)
    version, calls = agent.topology.resource_version, kubelet.calls
    host.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{}")
    await agent.until(lambda: kubelet.calls > calls)
    await asyncio.sleep(0.1)
    assert agent.topology.resource_version == version


VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/GP102GL")
FIRST, SECOND = "0000:c1:00.1", "0000:c1:00.2"
MEDIATED = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
N0, N1 = NumaId(0), NumaId(1)


def test_the_variables_of_each_device_plugin_are_read() -> None:
    variables = [
        f"PCIDEVICE_INTEL_COM_VF={FIRST},{SECOND}",
        f'PCIDEVICE_INTEL_COM_VF_INFO={{"{FIRST}":{{"generic":{{"deviceID":"{FIRST}"}}}}}}',
        "PCI_RESOURCE_NVIDIA_COM_GP102GL=0000:3B:00.0",
        f"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q={MEDIATED}",
        "PATH=/usr/bin",
    ]
    assert given_devices(variables, ["intel.com/vf=0000:5e:02.0", "nvidia.com/gpu=all"]) == (
        GivenDevice("INTEL_COM_VF", "0000:5e:02.0"),
        GivenDevice("INTEL_COM_VF", FIRST),
        GivenDevice("INTEL_COM_VF", SECOND),
        GivenDevice("NVIDIA_COM_GP102GL", "0000:3b:00.0"),
        GivenDevice("NVIDIA_COM_GRID_T4-1Q", MEDIATED),
    )


@given(st.lists(st.text()), st.lists(st.text()))
def test_any_text_is_read_without_an_error(variables: list[str], names: list[str]) -> None:
    hostile = [f"PCI_RESOURCE_A={text}" for text in variables]
    for device in given_devices([*variables, *hostile], names):
        assert "/" not in device.address
        assert len(device.address) <= 36


def test_of_more_devices_than_a_machine_has_only_some_are_read() -> None:
    many = [f"PCI_RESOURCE_A{number}=0000:{number % 256:02x}:00.0" for number in range(2 * MOST_GIVEN)]
    assert len(given_devices(many, ())) == MOST_GIVEN
    assert given_devices(["PCI_RESOURCE_A=" + ",".join(["0000:00:00.0"] * 10_000)], ()) == ()


def test_devices_that_the_kubelet_lists_get_addresses_and_numa_nodes_from_sysfs() -> None:
    listed = (PodDevice(GPU, N0), PodDevice(VF, N0, FIRST))
    stated = (GivenDevice("NVIDIA_COM_GP102GL", "0000:3b:00.0"), GivenDevice("INTEL_COM_VF", FIRST))
    nodes = {"0000:3b:00.0": N1, FIRST: NO_NUMA}
    assert with_addresses(listed, stated, nodes) == (
        PodDevice(VF, NO_NUMA, FIRST),
        PodDevice(GPU, N1, "0000:3b:00.0"),
    )


def test_devices_that_the_kubelet_lists_stay_where_containers_state_others() -> None:
    listed = (PodDevice(VF, N0, FIRST),)
    both = (GivenDevice("INTEL_COM_VF", FIRST), GivenDevice("INTEL_COM_VF", SECOND))
    assert with_addresses(listed, both, {FIRST: N1, SECOND: N1}) == listed
    assert with_addresses(listed, both[1:], {}) == listed
    assert with_addresses(listed, [GivenDevice("OTHER", SECOND)], {SECOND: N1}) == listed


def test_the_numa_nodes_are_those_of_sysfs(tmp_path: Path) -> None:
    for folder, node in (f"pci/devices/{FIRST}", "1"), (f"pci/devices/{SECOND}", "-1"):
        (tmp_path / "bus" / folder).mkdir(parents=True)
        (tmp_path / "bus" / folder / "numa_node").write_text(f"{node}\n")
    broken = tmp_path / "bus/pci/devices/0000:00:00.0"
    broken.mkdir()
    (broken / "numa_node").write_text("none\n")
    stated = [GivenDevice("X", address) for address in (FIRST, SECOND, "0000:00:00.0", MEDIATED)]
    assert numa_nodes_of(stated, tmp_path) == {FIRST: N1, SECOND: NO_NUMA}
