"""Scripted faults of the in-memory cluster: errors, lost answers and slow calls of an API server.

A fault names an operation and which of its next calls it hits. It raises an error before the call takes
effect or after it (the answer is lost, as in a timeout), or holds the call there until the test releases it.
Nothing here sleeps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum


class Operation(Enum):
    """The calls that a fault can hit."""

    BIND = "bind"
    READ_ALL = "read_all"
    READ_POD = "read_pod"
    READ_VMI = "read_vmi"
    READ_LEDGER = "read_ledger"
    CREATE_LEDGER = "create_ledger"
    WRITE_LEDGER = "write_ledger"
    WRITE_CLAIM_STATUS = "write_claim_status"
    DELETE_LEDGER = "delete_ledger"
    RECORD_EVENT = "record_event"
    ANNOTATE_NODE = "annotate_node"
    REPLACE_PLACEMENT = "replace_placement"
    SET_POD_CONDITION = "set_pod_condition"
    CREATE_MIGRATION = "create_migration"
    DELETE_MIGRATION = "delete_migration"
    NOMINATE_NODE = "nominate_node"
    WRITE_TOPOLOGY = "write_topology"
    WRITE_TOPOLOGY_STATUS = "write_topology_status"
    READ_RESOURCE_TOPOLOGY = "read_resource_topology"
    WRITE_RESOURCE_TOPOLOGY = "write_resource_topology"


class Moment(Enum):
    """When a fault strikes: before the call took effect, or after it and before its answer."""

    BEFORE = "before"
    AFTER = "after"


@dataclass
class Hold:
    """A call that waits: `reached` is set when it arrives, `release()` lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        self.released.set()


@dataclass
class _Fault:
    operation: Operation
    moment: Moment
    countdown: int
    error: BaseException | None
    hold: Hold | None


class FaultScript:
    """The faults to come; each strikes once."""

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self.calls: Counter[Operation] = Counter()
        """How often each operation has been called."""

    @property
    def pending(self) -> int:
        """How many faults have not struck yet."""
        return len(self._faults)

    def fail(
        self,
        operation: Operation,
        error: BaseException,
        *,
        nth: int = 1,
        moment: Moment = Moment.BEFORE,
        times: int = 1,
    ) -> None:
        """Make the `nth` coming call (and the `times - 1` after it) end in an error."""
        for offset in range(times):
            self._faults.append(_Fault(operation, moment, nth + offset, error, None))

    def clear(self) -> None:
        """Drop the faults that have not struck."""
        self._faults.clear()

    def hold(self, operation: Operation, *, nth: int = 1, moment: Moment = Moment.BEFORE) -> Hold:
        """Make the `nth` coming call wait until the answered Hold is released."""
        hold = Hold()
        self._faults.append(_Fault(operation, moment, nth, None, hold))
        return hold

    @asynccontextmanager
    async def around(self, operation: Operation) -> AsyncIterator[None]:
        """Let the faults of a call strike before and after the block, which is its effect."""
        self.calls[operation] += 1
        await asyncio.sleep(0)
        due = []
        for fault in [fault for fault in self._faults if fault.operation is operation]:
            fault.countdown -= 1
            if fault.countdown == 0:
                self._faults.remove(fault)
                due.append(fault)
        await _strike([fault for fault in due if fault.moment is Moment.BEFORE])
        yield
        await _strike([fault for fault in due if fault.moment is Moment.AFTER])


async def _strike(faults: list[_Fault]) -> None:
    for fault in faults:
        if fault.hold is not None:
            fault.hold.reached.set()
            await fault.hold.released.wait()
    for fault in faults:
        if fault.error is not None:
            raise fault.error
