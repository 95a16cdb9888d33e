"""How much the tests try: all of it by default, less where HYPOTHESIS_PROFILE asks for a quick run.

A property test that names its own number of examples, and a simulation that names its own length, takes it
from here. `./make quick` and `./make mutants` choose the profiles `quick` and `mutants`; `./make test` tries
everything.
"""

from __future__ import annotations

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kvplace")
IN_FULL = PROFILE == "kvplace"
IS_QUICK = PROFILE == "quick"
QUICK_EXAMPLES = 5 if IS_QUICK else 10
"""Examples of a property test in a quick run, and of one that a mutant is tried with."""


def examples(in_full: int) -> int:
    """Return how many examples a property test tries, which tries `in_full` of them by default."""
    return in_full if IN_FULL else min(in_full, QUICK_EXAMPLES)


def rounds(in_full: int, quick: int) -> int:
    """Return the length of a simulation or the size of a table: `in_full` by default."""
    return in_full if IN_FULL else quick
