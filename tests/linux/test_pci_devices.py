"""NUMA nodes of PCI buses, from sysfs."""

from __future__ import annotations

from pathlib import Path

from kvplace.linux.pci_devices import numa_nodes_of_buses


def test_buses_and_roots_are_on_the_numa_node_of_their_devices(tmp_path: Path) -> None:
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    for address, root, node in (
        ("0000:00:1f.0", "pci0000:00", "0"),
        ("0000:c0:01.0", "pci0000:c0", "1"),
        ("0000:c1:00.0", "pci0000:c0/0000:c0:01.0", "1"),
        ("0000:c1:00.1", "pci0000:c0/0000:c0:01.0", "1"),
        ("0000:40:00.0", "pci0000:40", "-1"),
        ("0000:80:00.0", "pci0000:80", "0"),
        ("0000:80:01.0", "pci0000:80", "1"),
    ):
        folder = tmp_path / "devices" / root / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (devices / address).symlink_to(Path("../../../devices") / root / address)
    (devices / "0000:99:00.0").symlink_to("../../../devices/gone")
    assert numa_nodes_of_buses(tmp_path) == {
        "0000:00": 0,
        "pci0000:00": 0,
        "0000:c0": 1,
        "0000:c1": 1,
        "pci0000:c0": 1,
    }
    assert numa_nodes_of_buses(tmp_path / "nothing") == {}
