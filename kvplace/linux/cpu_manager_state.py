"""Reads which CPUs the kubelet's own static policy has given to containers.

The kubelet keeps them in /var/lib/kubelet/cpu_manager_state, in one of four versions, each with a checksum
over Go's printed form of the content (pkg/kubelet/cm/cpumanager/state/checkpoint.go; FNV-1a, 32 bit). A file
with a wrong checksum is refused as a whole: the cores in it must not be given out twice. A checksum that is 0
or absent is unset and proves nothing, for the kubelet as well: such a file is read. The kubelet's present
policy is not known here, so the file of any policy is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.scalars import NO_CPUS, CpuMask

MAX_BYTES = 1024 * 1024
"""Longest file we read; 500 containers stay below a tenth of it."""

_FNV_START = 0x811C9DC5
_FNV_PRIME = 0x01000193
_NAMES = ("CPUManagerCheckpoint", "CPUManagerCheckpointV3")


class _Unreadable(Exception):
    """Why the file cannot be used."""


@dataclass(frozen=True, slots=True)
class CpuManagerState:
    """The CPUs that the kubelet has given out."""

    policy: str
    default: CpuMask
    """CPUs of the shared pool."""
    containers: Mapping[tuple[str, str], CpuMask]
    """CPUs by (pod UID, container); a file of version 1 knows container ids alone and has an empty UID."""
    pods: Mapping[str, CpuMask]
    """CPUs by pod UID, where resources are asked for by the whole pod."""

    @property
    def held(self) -> CpuMask:
        """All CPUs that some container or pod has for itself."""
        held = NO_CPUS
        for cpus in (*self.containers.values(), *self.pods.values()):
            held |= cpus
        return held


def read_cpu_manager_state(text: str, *, what: str = "cpu_manager_state") -> CpuManagerState:
    """Read the file's content; raises BadBody with one sentence that begins with `what`."""
    if len(text) > MAX_BYTES:
        raise BadBody(f"{what} is longer than {MAX_BYTES} bytes; is it the kubelet's cpu_manager_state?")
    try:
        root = _object(text)
        data, checksum = root.get("data"), root.get("datachecksum")
        if data or checksum:
            return _version_4(data, checksum)
        return _older_version(root)
    except (_Unreadable, ValueError) as error:
        raise BadBody(f"{what} is not a cpu_manager_state that the kubelet would read: {error}") from None


def _version_4(data: object, checksum: object) -> CpuManagerState:
    if not isinstance(data, str) or not data:
        raise _Unreadable("it has a dataChecksum but no data")
    if not checksum:
        raise _Unreadable("it has data but no dataChecksum")
    _check(checksum, [f"(string){data}"], "dataChecksum")
    return _state(_object(data))


def _older_version(root: Mapping[str, Any]) -> CpuManagerState:
    state = _state(root)
    # A kubelet leaves out pods of a file with an unset checksum; their CPUs stay held here.
    checksum = root.get("checksum")
    if checksum not in (None, 0):
        _check(checksum, list(_printed(root, state)), "checksum")
    return state


def _state(root: Mapping[str, Any]) -> CpuManagerState:
    containers: dict[tuple[str, str], CpuMask] = {}
    for key, value in _mapping(root, "entries").items():
        if isinstance(value, dict):
            for container, cpus in value.items():
                containers[key, container] = _cpus(cpus, f"container {container[:60]!r}")
        else:
            containers["", key] = _cpus(value, f"container {key[:60]!r}")
    pods = {}
    for pod, entry in _mapping(root, "podentries").items():
        if not isinstance(entry, dict):
            raise _Unreadable(f"the entry of pod {pod[:60]!r} is not an object")
        pods[pod] = _cpus(_lowered(entry).get("cpuset", ""), f"pod {pod[:60]!r}")
    policy = root.get("policyname")
    if not isinstance(policy, str):
        raise _Unreadable("it has no policyName")
    default = _cpus(root.get("defaultcpuset", ""), "defaultCpuSet")
    return CpuManagerState(policy, default, containers, pods)


def _printed(root: Mapping[str, Any], state: CpuManagerState) -> Iterator[str]:
    """Print the content as Go does, in each of the ways that the version may be."""
    entries = _mapping(root, "entries")
    policy, default = root["policyname"], root.get("defaultcpuset", "")
    flat = all(isinstance(cpus, str) for cpus in entries.values())
    nested = all(isinstance(inner, dict) for inner in entries.values())
    start = f"PolicyName:(string){policy} DefaultCPUSet:(string){default} Entries:"
    end = " Checksum:(checksum.Checksum)0}"
    if flat and not state.pods:
        yield f"(*state.{_NAMES[0]}){{{start}(map[string]string){_go_map(entries)}{end}"
    if nested:
        inner = {pod: _go_map(containers) for pod, containers in entries.items()}
        printed = f"{start}(map[string]map[string]string){_go_map(inner)}"
        if not state.pods:
            yield f"(*state.{_NAMES[0]}){{{printed}{end}"
        pods = {pod: _go_cpus(cpus) for pod, cpus in state.pods.items()}
        for name in _NAMES:
            yield f"(*state.{name}){{{printed} PodEntries:(state.PodCPUAssignments){_go_map(pods)}{end}"


def _go_map(items: Mapping[str, str]) -> str:
    return f"map[{' '.join(f'{key}:{items[key]}' for key in sorted(items, key=_bytes))}]"


def _go_cpus(cpus: CpuMask) -> str:
    elements = " ".join(f"{cpu}:{{}}" for cpu in cpus_of(cpus))
    return f"{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}})map[{elements}]}}}}"


def _check(written: object, printed: list[str], name: str) -> None:
    if type(written) is not int:
        raise _Unreadable(f"its {name} is not a number")
    if not any(_fnv(text) == written for text in printed):
        raise _Unreadable(
            f"its {name} {str(written)[:20]} does not fit its content; it is damaged or was edited"
        )


def _fnv(text: str) -> int:
    value = _FNV_START
    for byte in _bytes(text):
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return value


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _object(text: str) -> dict[str, Any]:
    if not text.strip():
        raise _Unreadable("it is empty")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _Unreadable("it is not JSON") from None
    if not isinstance(found, dict):
        raise _Unreadable("it is not a JSON object")
    return _lowered(found)


def _lowered(found: Mapping[str, Any]) -> dict[str, Any]:
    """Lower-case the keys: the kubelet accepts them in any case."""
    return {key.lower(): value for key, value in found.items()}


def _mapping(root: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = root.get(key) or {}
    if not isinstance(found, dict):
        raise _Unreadable(f"its {key} is not an object")
    return found


def _cpus(value: object, where: str) -> CpuMask:
    if not isinstance(value, str):
        raise _Unreadable(f"the CPUs of {where} are not a CPU list such as '2-3'")
    return parse_cpu_list(value, what=f"the CPU list of {where}")
