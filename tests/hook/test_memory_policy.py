"""Memory is bound where it will work, and left unbound with a reason where it will not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvplace.core.errors import Misconfigured
from kvplace.core.request import NumaMemory, OnFailure
from kvplace.core.scalars import Bytes, NumaId
from kvplace.hook.bounds import settle_memory
from tests.hook.machine import PLACEMENT

STRICT = replace(PLACEMENT, numa_memory=NumaMemory.STRICT)


def works(_: NumaMemory, __: Sequence[int]) -> None:
    return None


def forbidden(_: NumaMemory, __: Sequence[int]) -> str:
    return "the pod's seccomp profile forbids mbind"


def never(_: NumaMemory, __: Sequence[int]) -> str:
    raise AssertionError


def test_a_binding_that_works_is_kept() -> None:
    assert settle_memory(STRICT, 0b11, OnFailure.WAIT, works) == (STRICT, None)


def test_the_binding_that_the_domain_will_have_is_tried() -> None:
    tried: list[NumaMemory] = []

    def trial(mode: NumaMemory, _: Sequence[int]) -> None:
        tried.append(mode)

    pages = {NumaId(node): {Bytes(2 << 20): 512} for node in range(2)}
    paged = replace(PLACEMENT, numa_nodes=tuple(pages), huge_pages=pages)
    assert settle_memory(paged, 0b11, OnFailure.WAIT, trial) == (paged, None)
    assert tried == [NumaMemory.INTERLEAVE]


def test_no_binding_needs_no_trial() -> None:
    unbound = replace(PLACEMENT, numa_memory=NumaMemory.OFF)
    assert settle_memory(unbound, 0b11, OnFailure.WAIT, never) == (unbound, None)


@pytest.mark.parametrize("mode", [NumaMemory.PREFERRED, NumaMemory.INTERLEAVE])
@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_a_preferred_binding_that_is_forbidden_is_removed_with_the_reason(
    mode: NumaMemory, on_failure: OnFailure
) -> None:
    settled, reason = settle_memory(replace(PLACEMENT, numa_memory=mode), 0b11, on_failure, forbidden)
    assert settled == replace(PLACEMENT, numa_memory=NumaMemory.OFF)
    assert reason == "the pod's seccomp profile forbids mbind"


def test_a_forbidden_strict_binding_is_an_error_with_wait() -> None:
    with pytest.raises(
        Misconfigured, match=r"numa-memory strict is not possible: .* forbids mbind; change that, or set"
    ):
        settle_memory(STRICT, 0b11, OnFailure.WAIT, forbidden)


def test_a_forbidden_strict_binding_is_removed_with_float() -> None:
    settled, reason = settle_memory(STRICT, 0b11, OnFailure.FLOAT, forbidden)
    assert settled.numa_memory is NumaMemory.OFF
    assert reason is not None


@pytest.mark.parametrize("allowed", [0b10, 0])
def test_nodes_that_the_pod_may_not_use_are_an_obstacle_without_any_trial(allowed: int) -> None:
    settled, reason = settle_memory(PLACEMENT, allowed, OnFailure.WAIT, never)
    assert settled.numa_memory is NumaMemory.OFF
    assert reason is not None
    assert reason.startswith("NUMA node 0 of the placement is outside the NUMA nodes")


def test_a_placement_without_nodes_is_left_unbound() -> None:
    _, reason = settle_memory(replace(PLACEMENT, numa_nodes=()), None, OnFailure.WAIT, never)
    assert reason == "the placement has no NUMA node"


# The trial itself, under the kernel's eyes: each in a process of its own, as in the hook.

TRIAL = """
import sys
from kvplace.core.request import NumaMemory
from kvplace.hook.bounds import try_to_bind
mode, nodes = NumaMemory(sys.argv[1]), [int(node) for node in sys.argv[2].split(",")]
if len(sys.argv) > 3:
    import ctypes, struct
    # A filter as containerd's default profile is for a process without CAP_SYS_NICE: load the call's number,
    # answer the four memory policy calls with EPERM, let everything else through (linux/filter.h).
    numbers = [int(number) for number in sys.argv[3].split(",")]
    code = struct.pack("HBBI", 0x20, 0, 0, 0)
    for left, number in zip(range(len(numbers), 0, -1), numbers):
        code += struct.pack("HBBI", 0x15, left, 0, number)
    code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("HBBI", 0x06, 0, 0, 0x00050001)
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0
print(try_to_bind(mode, nodes))
"""


def tried(mode: NumaMemory, nodes: str, *denied: int) -> str:
    words = [mode.value, nodes, *([",".join(map(str, denied))] if denied else [])]
    done = subprocess.run([sys.executable, "-c", TRIAL, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names calls of x86-64")


@needs_x86
@pytest.mark.parametrize("mode", [NumaMemory.PREFERRED, NumaMemory.STRICT, NumaMemory.INTERLEAVE])
@pytest.mark.parametrize(("denied", "call"), [((238, 237, 239, 450), "set_mempolicy"), ((237,), "mbind")])
def test_a_profile_that_forbids_memory_policies_is_noticed(
    mode: NumaMemory, denied: tuple[int, ...], call: str
) -> None:
    outcome = tried(mode, "0", *denied)
    if "has no" not in outcome:  # a kernel without NUMA refuses before any profile does
        assert outcome == f"the pod's seccomp profile forbids {call}"


def test_the_trial_agrees_with_the_kernel_about_node_0_and_refuses_a_node_that_is_not_there() -> None:
    outcome = tried(NumaMemory.PREFERRED, "0")
    if outcome != "None":
        assert "has no set_mempolicy" in outcome or "forbids" in outcome
        return
    assert tried(NumaMemory.STRICT, "0") == "None"
    assert tried(NumaMemory.STRICT, "900").startswith("the kernel refuses NUMA node 900 with set_mempolicy")
