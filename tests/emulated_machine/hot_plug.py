"""Run inside an emulated machine: the CPUs that the agent knows after one goes offline and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from harness.waiting import PATIENCE_S
from kvplace.agent.this_machine import AgentSettings, MachineWatch
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.service.connections import Address
from kvplace.service.process import in_background


def online_sets(cpu: int) -> list[CpuMask]:
    """Switch a CPU off and on; return the CPUs that the watch then has."""
    return asyncio.run(_online_sets(Path(f"/sys/devices/system/cpu/cpu{cpu}/online")))


async def _online_sets(switch: Path) -> list[CpuMask]:
    watch = MachineWatch(AgentSettings(NodeName("here"), Address("127.0.0.1", 0)))
    changed = asyncio.Event()
    watch.subscribe(changed.set)
    found = []
    async with in_background(watch.run()):
        await asyncio.sleep(0)  # the watch has begun
        for state in ("0", "1"):
            before = watch.machine.topology.cpus
            await asyncio.to_thread(switch.write_text, state)
            async with asyncio.timeout(PATIENCE_S):
                while watch.machine.topology.cpus == before:  # other changes are noticed, too
                    changed.clear()
                    await changed.wait()
            found.append(watch.machine.topology.cpus)
    return found
