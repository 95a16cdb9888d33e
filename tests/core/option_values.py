"""Every value of every key that a user may write, with the options that it sets."""

from __future__ import annotations

from collections.abc import Mapping

from kvplace.core.request import (
    DeviceNuma,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    Policy,
    Scope,
    Smt,
)
from kvplace.core.well_known_names import OPTING_IN

VALUES: list[tuple[str, str, Mapping[str, object]]] = [
    *(("cpu-set", scope.value, {"scope": scope}) for scope in Scope),
    *(("kvplace.io/cpu-set", scope.value, {"scope": scope}) for scope in Scope),
    *(("kvplace.io/cpu-policy", policy.value, {"policy": policy}) for policy in Policy),
    *(("kvplace.io/smt", smt.value, {"smt": smt}) for smt in Smt),
    *(("kvplace.io/emulator-threads", word.value, {"emulator_threads": word}) for word in EmulatorThreads),
    *(("kvplace.io/numa-memory", word.value, {"numa_memory": word}) for word in NumaMemory),
    *(("kvplace.io/guest-numa", word.value, {"guest_numa": word}) for word in GuestNuma),
    *(("kvplace.io/device-numa", word.value, {"device_numa": word}) for word in DeviceNuma),
    *(("kvplace.io/on-failure", word.value, {"on_failure": word}) for word in OnFailure),
    ("kvplace.io/explain", "true", {}),
    *(
        ("topology.crane.io/cpu-policy", word, {"policy": Policy(word)})
        for word in ("none", "exclusive", "numa", "immovable")
    ),
    (
        "topology.crane.io/topology-awareness",
        "true",
        {"scope": Scope.ONE_NUMA},
    ),
    *(
        ("qos.gocrane.io/cpu-manager", word, {"policy": Policy(word)})
        for word in ("none", "exclusive", "share")
    ),
]


def annotations_with(key: str, value: str) -> dict[str, str]:
    """Return the annotations of a VM that opts in and sets this key."""
    return {key: value} if key in OPTING_IN else {"cpu-set": "one-socket", key: value}
