"""The machine descriptions that come with kvplace, by name.

They have the form that `kvplace topology -o json` prints, so that a captured machine can stand beside
them. Written anew, after a change of `server_types`, by `python -m kvplace.machines.shipped`.
"""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvplace.core.errors import BadTopology
from kvplace.core.node_topology import node_topology
from kvplace.core.topology import Topology
from kvplace.core.topology_document import read_topology
from kvplace.machines.server_types import SERVER_TYPES, ServerType, topology_of

TITLE = "kvplace.io/machine"
"""Annotation of a machine description: what an operator calls the machine."""


def machine_names() -> tuple[str, ...]:
    """List the machines that come with kvplace, in the order of their names."""
    return tuple(
        sorted(
            entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json")
        )
    )


def read_machine(name: str) -> Topology:
    """Read one of the machines that come with kvplace; raises BadTopology when there is none of that name."""
    names = machine_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
        raise BadTopology(f"no machine {name!r} comes with kvplace; {hint}")
    return read_topology(json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8")))


def machine_document(server: ServerType) -> dict[str, Any]:
    """Write a server type as the NodeTopology of a node of that name."""
    document = node_topology(server.name, topology_of(server))
    document["metadata"]["annotations"] = {TITLE: server.title}
    return document


def write_machines(folder: Path) -> None:
    """Write every server type into a folder, one file each."""
    for server in SERVER_TYPES:
        text = json.dumps(machine_document(server), indent=1)
        (folder / f"{server.name}.json").write_text(text + "\n", encoding="utf-8")


def _folder() -> Traversable:
    return files("kvplace.machines") / "shipped_machines"


if __name__ == "__main__":
    write_machines(Path(__file__).parent / "shipped_machines")
