"""The JSON form of `PinningOptions`, as requests, documents and placements contain it."""

from __future__ import annotations

from kvplace.core.fields import Fields
from kvplace.core.request import PinningOptions
from kvplace.core.strict_json import Json

OPTION_KEYS = {
    "cpuSet": "scope",
    "policy": "policy",
    "smt": "smt",
    "emulatorThreads": "emulator_threads",
    "numaMemory": "numa_memory",
    "guestNuma": "guest_numa",
    "deviceNuma": "device_numa",
    "onFailure": "on_failure",
}
"""Field of `PinningOptions` by the key that sets it."""


def options_document(options: PinningOptions) -> Json:
    """Write options; `read_options_document` gives them back unchanged."""
    return {key: getattr(options, field).value for key, field in OPTION_KEYS.items()}


def read_options_document(fields: Fields) -> PinningOptions:
    """Read options, where all may be missing; raises ValueError that names the field."""
    defaults = PinningOptions()
    options = {
        field: fields.word(key, type(getattr(defaults, field)), getattr(defaults, field))
        for key, field in OPTION_KEYS.items()
    }
    return PinningOptions(**options)
