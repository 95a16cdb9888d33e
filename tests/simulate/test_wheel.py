"""An installed kvplace contains its VM templates."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from kvplace.simulate.demo_vms import read_templates

PROJECT = Path(__file__).resolve().parents[2]


def test_the_wheel_contains_every_template(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(PROJECT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        template = archive.read("kvplace/simulate/vm-templates/database.yaml")
    assert {f"kvplace/simulate/vm-templates/{name}.yaml" for name in read_templates()} <= held
    assert template == (PROJECT / "vm-templates" / "database.yaml").read_bytes()
