"""The devices of a container, out of variables and names that a tenant may have written."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvplace.agent.devices import (
    MOST_GIVEN,
    given_devices,
    numa_nodes_of,
    with_addresses,
)
from kvplace.agent.node_plan import GivenDevice
from kvplace.core.node_devices import NO_NUMA, PodDevice
from kvplace.core.scalars import NumaId, ResourceName

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


def test_what_the_kubelet_lists_gets_addresses_and_the_nodes_of_sysfs() -> None:
    listed = (PodDevice(GPU, N0), PodDevice(VF, N0, FIRST))
    stated = (GivenDevice("NVIDIA_COM_GP102GL", "0000:3b:00.0"), GivenDevice("INTEL_COM_VF", FIRST))
    nodes = {"0000:3b:00.0": N1, FIRST: NO_NUMA}
    assert with_addresses(listed, stated, nodes) == (
        PodDevice(VF, NO_NUMA, FIRST),
        PodDevice(GPU, N1, "0000:3b:00.0"),
    )


def test_what_the_kubelet_lists_stays_where_containers_state_something_else() -> None:
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
