"""Clusters in memory that are nearly full, and the longest wait of the event loop of `serve`."""

from __future__ import annotations

import asyncio
import random
import time

from kvplace.core.allocator.allocate import try_place
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import read_machine

SERVER_TYPES = ("2x-epyc-9354-nps2", "2x-xeon-6338", "epyc-9654p", "2x-xeon-8480plus-snc4")
_VCPUS = (2, 2, 4, 4, 8, 8, 16)
_GONE = 0.35
"""Another VM ends after this share of the VMs."""


def filled_cluster(nodes: int, share: float, chance: random.Random) -> dict[str, tuple[Topology, Ledger]]:
    """Let VMs come and go until so much of every node is taken."""
    types = [read_machine(name) for name in SERVER_TYPES]
    made: dict[str, tuple[Topology, Ledger]] = {}
    for number in range(nodes):
        machine, ledger = types[number % len(types)], Ledger()
        wanted = int(machine.allocatable.bit_count() * min(1.0, chance.gauss(share, 0.05)))
        vms = 0
        while ledger.owned.bit_count() < wanted:
            vms += 1
            options = PinningOptions(scope=Scope.ONE_NUMA)
            request = Request(chance.choice(_VCPUS), options, Bytes(0), {}, 0)
            placement = try_place(machine, free_of(machine, ledger), request)
            if placement is None:
                break
            uid = PodUid(f"running-{number}-{vms}")
            claim = claim_of(uid, placement, since="2026-01-01T00:00:00Z")
            ledger = ledger.after(LedgerChange(claims=(claim,)))
            if chance.random() < _GONE:
                ledger = ledger.after(LedgerChange(releases=(chance.choice(sorted(ledger.claims)),)))
        made[f"node-{number:03}"] = (machine, ledger)
    return made


async def longest_stretch() -> float:
    """Wait until cancelled; return the CPU time of the longest stretch without a turn, in seconds."""
    longest, last = 0.0, time.process_time()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest
