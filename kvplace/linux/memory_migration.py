"""Moving the memory of a running process to other NUMA nodes, with migrate_pages(2).

The kernel copies the pages that exist; where new ones are taken from is decided by the process's own memory
policy and by its cpuset. The call walks all page tables and may take seconds for a large VM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.scalars import NumaId
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted

_NUMBERS = {"x86_64": 256, "aarch64": 238, "s390x": 287, "ppc64le": 258, "riscv64": 238}
"""The number of the system call, by architecture: the C library has no function for it."""
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def migrate_memory(pid: int, sources: Iterable[NumaId], targets: Iterable[NumaId]) -> int:
    """Move the pages of a process from some NUMA nodes to others; returns how many stayed.

    The n-th source goes to the n-th target, in ascending order; further sources begin with the first target
    again. The targets must be in the process's cpuset. Blocks until it is done. Raises Gone, NotPermitted, or
    KernelError where the kernel cannot do it at all.
    """
    old, new = mask_of(sources), mask_of(targets)
    if not old or not new:
        return 0
    words = max(old, new).bit_length() // _WORD + 1
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise KernelError(f"memory cannot be moved on {platform.machine()}: its system call is not known")
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is given.
    stayed = int(
        libc.syscall(number, pid, ctypes.c_ulong(words * _WORD + 1), _words(old, words), _words(new, words))
    )
    if stayed >= 0:
        return stayed
    what = f"memory of process {pid} cannot be moved to NUMA node {format_cpu_list(new)}"
    code = ctypes.get_errno()
    match code:
        case errno.ESRCH:
            raise Gone(f"{what}: there is no such process")
        case errno.EPERM | errno.EACCES:
            raise NotPermitted(
                f"{what}: {os.strerror(code)}; the agent needs CAP_SYS_NICE and CAP_SYS_PTRACE"
            )
        case _:
            raise KernelError(f"{what}: {os.strerror(code)}")


def _words(mask: int, count: int) -> ctypes.Array[ctypes.c_ulong]:
    return (ctypes.c_ulong * count)(*(mask >> _WORD * word & (1 << _WORD) - 1 for word in range(count)))
