"""The machines that come with kvplace, by name."""

from __future__ import annotations

from functools import cache

from kvplace.core.errors import BadTopology
from kvplace.core.near_words import did_you_mean
from kvplace.core.topology import Topology
from kvplace.machines.server_types import SERVER_TYPES, topology_of


def machine_names() -> tuple[str, ...]:
    """List the machines that come with kvplace, in the order of their names."""
    return tuple(sorted(server.name for server in SERVER_TYPES))


@cache
def read_machine(name: str) -> Topology:
    """Give the machine of a name; raises BadTopology for an unknown one."""
    for server in SERVER_TYPES:
        if server.name == name:
            return topology_of(server)
    hint = did_you_mean(name, machine_names()) or f"; there are: {', '.join(machine_names())}"
    raise BadTopology(f"no server type is called {name!r}{hint}")
