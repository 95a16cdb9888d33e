"""Whether QEMU will be allowed to bind memory, found out by trying it.

The sidecar runs under the same seccomp profile as the container that starts QEMU. containerd's default
profile forbids these calls without CAP_SYS_NICE; libvirt then refuses to start a domain with a `<numatune>`.

The trial changes the memory policy of its process and loads ctypes: call it only in a short-lived one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import Misconfigured
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, OnFailure

_SET_MEMPOLICY_AND_MBIND = {
    "x86_64": (238, 237),
    "aarch64": (237, 235),
    "riscv64": (237, 235),
    "s390x": (270, 268),
    "ppc64le": (261, 259),
}
_DEFAULT, _PREFERRED, _BIND, _INTERLEAVE, _PREFERRED_MANY = 0, 1, 2, 3, 5  # linux/mempolicy.h
_STRICT_AND_MOVE = 1 | 2  # what QEMU asks mbind for
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Trial = Callable[[NumaMemory, Sequence[int]], str | None]
"""States why memory cannot be bound to these nodes, or None when it can."""


def settle_memory(
    placement: Placement, allowed_nodes: int | None, on_failure: OnFailure, trial: Trial
) -> tuple[Placement, str | None]:
    """Keep the memory binding where it will work, else remove it and state why.

    Raises Misconfigured instead for `numa-memory: strict` with `on-failure: wait`.
    """
    if placement.numa_memory is NumaMemory.OFF:
        return placement, None
    obstacle = _obstacle(placement, allowed_nodes, trial)
    if obstacle is None:
        return placement, None
    if placement.numa_memory is NumaMemory.STRICT and on_failure is OnFailure.WAIT:
        raise Misconfigured(
            f"numa-memory strict is not possible: {obstacle}; change that, or set numa-memory to preferred "
            "or on-failure to float"
        )
    return replace(placement, numa_memory=NumaMemory.OFF), obstacle


def try_to_bind(mode: NumaMemory, nodes: Sequence[int]) -> str | None:
    """Make the calls that libvirt and QEMU will make; returns one sentence when one fails."""
    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY_AND_MBIND:
        return f"binding memory is not supported on {machine}"
    set_mempolicy, mbind = _SET_MEMPOLICY_AND_MBIND[machine]
    policy = {
        NumaMemory.PREFERRED: _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY,
        NumaMemory.STRICT: _BIND,
        NumaMemory.INTERLEAVE: _INTERLEAVE,
    }[mode]
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    bits = words * _WORD_BITS + 1  # the kernel subtracts one
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(set_mempolicy, policy, mask, ctypes.c_ulong(bits)) != 0:
        return _why("set_mempolicy", policy, nodes)
    syscall(set_mempolicy, _DEFAULT, None, ctypes.c_ulong(0))
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(start))
        answer = syscall(
            mbind, address, ctypes.c_ulong(len(page)), policy, mask, ctypes.c_ulong(bits), _STRICT_AND_MOVE
        )
        del start  # the page cannot be unmapped while ctypes holds a pointer to it
        return None if answer == 0 else _why("mbind", policy, nodes)


def _obstacle(placement: Placement, allowed_nodes: int | None, trial: Trial) -> str | None:
    if not placement.numa_nodes:
        return "the placement has no NUMA node"
    nodes = mask_of(placement.memory_nodes)
    if allowed_nodes is not None and nodes & ~allowed_nodes:
        return (
            f"NUMA node {format_cpu_list(nodes & ~allowed_nodes)} of the placement is outside the NUMA nodes "
            f"{format_cpu_list(allowed_nodes)} that this pod may use"
        )
    return trial(placement.memory_mode, placement.memory_nodes)


def _why(call: str, policy: int, nodes: Sequence[int]) -> str:
    code = ctypes.get_errno()
    if code == errno.EPERM:
        return f"the pod's seccomp profile forbids {call}"
    if code == errno.ENOSYS:
        return f"the kernel has no {call}, or the pod's seccomp profile hides it"
    if code == errno.EINVAL and policy == _PREFERRED_MANY:
        return "the kernel cannot prefer several NUMA nodes at once (it needs Linux 5.15)"
    named = format_cpu_list(mask_of(nodes))
    return f"the kernel refuses NUMA node {named} with {call}: {os.strerror(code)}"
