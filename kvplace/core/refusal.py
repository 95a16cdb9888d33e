"""Why a VM does not fit a machine, with the shortfall in numbers.

All reasons are listed here. `never` marks requests that would not fit an empty machine either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

THE_MACHINE = "the machine"
"""Where something is missing when the scope is all of it."""


class Reason(Enum):
    """The first constraint that failed."""

    NO_SOCKET_FITS = "NoSocketFits"
    NO_NUMA_NODE_FITS = "NoNumaNodeFits"
    NO_L3_FITS = "NoL3Fits"
    NO_NODE_FITS = "NotEnoughCpus"
    NOT_ENOUGH_MEMORY = "NotEnoughMemory"
    NOT_ENOUGH_HUGE_PAGES = "NotEnoughHugePages"
    NO_LOCAL_DEVICES = "NoLocalDevices"
    NO_TOPOLOGY = "NoTopology"
    NODE_FILTERED = "NodeFiltered"
    """kube-scheduler keeps the VM away whatever is free: a cordon, a taint, a label that the node lacks."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, and why: a sentence for people, the numbers for programs."""

    reason: Reason
    message: str
    shortfall: Mapping[str, int | str]
    never: bool
    """Whether it would not fit either if the machine were empty."""
    missing: int = field(init=False, repr=False, compare=False)
    """How much is missing, in the unit of the reason; 0 where that is not known."""
    group: tuple[str, bool, str] = field(init=False, repr=False, compare=False)
    """Equal for refusals for one reason, whatever their numbers."""

    def __post_init__(self) -> None:
        missing = self.shortfall.get("missing", 0)
        object.__setattr__(self, "missing", missing if isinstance(missing, int) else 0)
        message = "" if "where" in self.shortfall else self.message
        # The name of a reason is hashed in a tenth of the time that the reason takes.
        object.__setattr__(self, "group", (self.reason._name_, self.never, message))
