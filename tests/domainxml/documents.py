"""Domain documents for tests: written from a few lines, and read back."""

from __future__ import annotations

from typing import Any

from lxml import etree


def pins(xml: bytes) -> dict[str, str]:
    """Read all pins back, as `vcpu 0` -> `2`; asserts that none is there twice."""
    found: dict[str, str] = {}
    for pin in etree.fromstring(xml).iterfind("cputune/*"):
        number = pin.get("vcpu") or pin.get("iothread")
        name = {"vcpupin": f"vcpu {number}", "iothreadpin": f"io {number}", "emulatorpin": "emulator"}.get(
            str(pin.tag)
        )
        if name is not None:
            assert name not in found
            found[name] = pin.get("cpuset", "")
    return found


def domain(*lines: str) -> bytes:
    return f"<domain>{''.join(lines)}</domain>".encode()


def bindings(xml: bytes) -> list[dict[str, str]]:
    found = etree.fromstring(xml).iterfind("numatune/*")
    return [{"is": str(part.tag), **{str(key): str(value) for key, value in part.items()}} for part in found]


def topology(xml: bytes) -> tuple[int, ...]:
    (found,) = etree.fromstring(xml).iterfind("cpu/topology")
    assert set(found.keys()) == {"sockets", "cores", "threads"}
    return tuple(int(found.get(name, "")) for name in ("sockets", "cores", "threads"))


def cells(xml: bytes) -> list[dict[str, Any]]:
    return [
        {str(key): str(value) for key, value in cell.items()}
        | {"distances": [sibling.get("value") for sibling in cell.iterfind("distances/sibling")]}
        for cell in etree.fromstring(xml).iterfind("cpu/numa/cell")
    ]
