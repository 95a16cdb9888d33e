"""Mutation testing: small changes of the code, and which of them no test notices.

mutmut copies the project into `mutants/`, changes one function at a time and runs the tests that reach it in
a fork of one process. pyproject.toml names the components; they have about 5,000 mutants.
Real servers stay out of it (they would be asked thousands of times), so a mutant that only they would
notice counts as a survivor.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dev.step import show

_NOTICED = {"killed", "timeout", "segfault", "suspicious"}


def run(project: Path, binaries: Path, names: list[str], environment: Mapping[str, str]) -> int:
    """Run mutmut and print a table by module, then the survivors; returns mutmut's exit code.

    `names` are mutants or patterns such as `kvplace.core.ledger*`; without any, all are run. Results are kept
    in `mutants/`, so a second run repeats only the changed functions.
    """
    shutil.rmtree(project / "mutants" / "tests", ignore_errors=True)  # mutmut copies tests only once
    data = os.environ.get("KVPLACE_CAPTURED_DATA", str(project.parent / "shared" / "data"))
    children = f"--max-children={os.cpu_count() or 1}"
    code = show(
        [binaries / "mutmut", "run", children, *names],
        cwd=project,
        environment={**environment, "KVPLACE_CAPTURED_DATA": data, "HYPOTHESIS_PROFILE": "mutants"},
    )
    listed = subprocess.run(
        [binaries / "mutmut", "results", "--all", "true"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    _report(listed.stdout)
    return code


def _report(results: str) -> None:
    table: dict[str, Counter[bool]] = {}
    survivors: list[str] = []
    for line in results.splitlines():
        mutant, _, outcome = line.strip().partition(": ")
        if outcome in {"", "not checked"}:
            continue
        module = mutant.rpartition(".")[0]
        table.setdefault(module, Counter())[outcome in _NOTICED] += 1
        if outcome not in _NOTICED:
            survivors.append(f"{mutant}: {outcome}")
    total: Counter[bool] = sum(table.values(), Counter())
    print(f"\n{'module':<48} {'mutants':>8} {'noticed':>8} {'score':>8}")
    for module, counts in [*sorted(table.items()), ("all", total)]:
        share = 100 * counts[True] / (counts.total() or 1)
        print(f"{module:<48} {counts.total():>8} {counts[True]:>8} {share:>6.1f} %")
    print("\nnot noticed (show one with `.venv/bin/mutmut show NAME`):")
    for survivor in survivors:
        print(f"  {survivor}")
