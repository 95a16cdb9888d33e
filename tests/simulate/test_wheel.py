"""An installed kvplace has its machines and templates with it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from kvplace.machines.shipped import machine_names
from kvplace.simulate.vm_templates import read_templates

PROJECT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_every_machine_and_every_template(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(PROJECT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        template = archive.read("kvplace/simulate/vm-templates/database.yaml")
    assert {f"kvplace/machines/shipped_machines/{name}.json" for name in machine_names()} <= held
    assert {f"kvplace/simulate/vm-templates/{name}.yaml" for name in read_templates()} <= held
    assert template == (PROJECT / "vm-templates" / "database.yaml").read_bytes()
