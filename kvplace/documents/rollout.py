"""The rollout document: many VMs from templates, and how fast they are made.

    name: web
    vms:
    - template: vm-templates/web-server.yaml   # web-001 to web-500
      count: 500
    - name: db                                 # db-a and db-b
      names: [db-a, db-b]
      template: {apiVersion: kubevirt.io/v1, kind: VirtualMachine, spec: ...}
    waves: [1, 10%]                            # one VM, then a tenth of them, then the others
    maxInFlight: 100

Paths are relative to the document. YAML or JSON.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from kvplace.core.strict_json import shown
from kvplace.core.vm_stages import VmStage
from kvplace.documents.model import DocumentModel, Text, unique

MOST_VMS = 20_000
_LONGEST_NAME = 63
_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_DURATION = r"^[1-9][0-9]{0,6}(s|m|h)$"
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_PERCENT = r"^([1-9][0-9]?|100)%$"

ROLLOUT_EXAMPLE = """\
# VMs that are made together: `kvplace rollout create -f FILE`
name: shop
vms:
- name: web                  # web-001 to web-100
  count: 100
  template:                  # a VirtualMachine or VirtualMachineInstance, or the path of a file with one
    apiVersion: kubevirt.io/v1
    kind: VirtualMachine
    spec:
      runStrategy: Always
      template:
        metadata:
          annotations: {cpu-set: one-socket}
        spec:
          domain:
            cpu: {cores: 4}
            memory: {guest: 8Gi}
            devices: {}
waves: [1, 10%]              # one VM first, then a tenth of them, then all others
maxInFlight: 100             # VMs that are created but not ready, at most
maxFailures: 5               # nothing more is made after so many
timeout: 15m
"""


def name_problem(name: str) -> str | None:
    """State why a VM cannot have this name; None when it can."""
    if len(name) > _LONGEST_NAME:
        return f"{shown(name)} has {len(name)} characters; the name of a VM has at most {_LONGEST_NAME}"
    if not re.fullmatch(_NAME, name):
        return (
            f"{shown(name)} cannot be the name of a VM; write lower-case letters, digits and -, with a letter"
            " or digit at both ends"
        )
    return None


def _name(text: str) -> str:
    problem = name_problem(text)
    if problem is not None:
        raise ValueError(problem)
    return text


def read_duration(value: object) -> float:
    """Read 90s, 15m or 2h as seconds; raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(_DURATION, value):
        raise ValueError(f"{shown(value)} is not a duration; write for example 90s, 15m or 2h")
    return float(int(value[:-1]) * _SECONDS[value[-1]])


def _duration_text(seconds: float) -> str:
    """Write a duration as `read_duration` reads it: in seconds, unless these have too many digits."""
    texts = (f"{seconds / unit:.0f}{letter}" for letter, unit in _SECONDS.items() if not seconds % unit)
    return next(text for text in texts if re.fullmatch(_DURATION, text))


def _wave(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_VMS:
        return value
    if isinstance(value, str) and re.fullmatch(_PERCENT, value):
        return value
    raise ValueError(f"{shown(value)} is not a size of a wave; write a number of VMs, or a share such as 10%")


def _template(value: object) -> str | dict[str, Any]:
    if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError(
        f"{shown(value)} is not a template; write a VirtualMachine, a VirtualMachineInstance or a file"
    )


Name: TypeAlias = Annotated[
    Text,
    AfterValidator(_name),
    WithJsonSchema({"type": "string", "pattern": _NAME, "maxLength": _LONGEST_NAME}),
]
Duration: TypeAlias = Annotated[
    float,
    PlainValidator(read_duration),
    PlainSerializer(_duration_text),
    WithJsonSchema({"type": "string", "pattern": _DURATION, "examples": ["90s", "15m"]}),
]
Wave: TypeAlias = Annotated[
    int | str,
    PlainValidator(_wave),
    WithJsonSchema({"type": ["integer", "string"], "pattern": _PERCENT, "examples": [1, "10%"]}),
]

TemplateOrFile: TypeAlias = Annotated[
    str | dict[str, Any],
    PlainValidator(_template),
    WithJsonSchema({"type": ["string", "object"], "additionalProperties": True}),
]


class TemplatedVms(DocumentModel):
    """VMs made from one template: one VM, `count` equal VMs, or a VM for each of `names`."""

    name: Name | None = None
    """How their names begin; default: the name of the rollout."""
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_VMS)] | None = None
    """Makes so many VMs, named name-01, name-02, ..."""
    names: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_VMS)] | None = None
    """Makes one VM of each name."""
    template: TemplateOrFile
    """A VirtualMachine or VirtualMachineInstance, or the path of a file with one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count is not None and self.names is not None:
            raise ValueError("must have either count or names")
        unique(self.names or (), "VM")
        return self


class RolloutDocument(DocumentModel):
    """A rollout: the input of `kvplace rollout create`."""

    name: Name
    """The rollout; its VMs carry it as their label kvplace.io/rollout."""
    namespace: Name | None = None
    """Default: the namespace of the kubeconfig's context."""
    vms: Annotated[tuple[TemplatedVms, ...], Field(min_length=1, max_length=1000)]
    """Templates, each with the number or the names of the VMs that are made from it."""
    waves: Annotated[tuple[Wave, ...], Field(max_length=100)] = ()
    """Sizes of the first waves, in VMs or as shares such as 10%. Each wave begins when all VMs of
    the wave before are ready; the remaining VMs form the last wave. Default: one wave."""
    max_in_flight: Annotated[int, Field(strict=True, ge=1, le=MOST_VMS)] = 100
    """VMs that are created but not ready, at most."""
    max_failures: Annotated[int, Field(strict=True, ge=1, le=MOST_VMS)] | None = None
    """No more VMs are created once so many have failed; default: the others are created in any case."""
    until: VmStage = VmStage.PINNED
    """Stage of a ready VM. A VM that did not opt in is ready when it runs, a VM that stays off when it is
    created."""
    timeout: Duration = 1800.0
    """How long one run waits for all of them."""
