"""A checkout as a newcomer has it after `git clone`, and one of an earlier release.

Nothing of it is this checkout's, so files that the page's commands write stay there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from dev.environment import Environment
from dev.requirements import Constraints, Section
from kvplace import __version__

PROJECT = Path(__file__).resolve().parents[2]
EARLIER = "0.0.9"
_TEXT = {"type": "string"}
_COUNTS = {"type": "object", "additionalProperties": {"type": "integer"}}
EARLIER_CLAIM = {
    "type": "object",
    "required": ["namespace", "pod", "policy"],
    "properties": {
        **dict.fromkeys(("namespace", "pod", "vmi", "policy", "state", "cpus", "owned", "since"), _TEXT),
        "memory": _COUNTS,
        "hugePages": {"type": "object", "additionalProperties": _COUNTS},
        "revision": {"type": "integer"},
        "next": {"type": "object", "properties": {"placement": _TEXT, "previous": _TEXT}},
        "reserved": {"type": "object", "properties": {"owned": _TEXT, "until": _TEXT}},
    },
}
"""A claim in the CRD of an earlier release, with a field that is no longer known."""
_NOT_CLONED = shutil.ignore_patterns(
    *(".git", ".venv", "dist", "mutants", "__pycache__", ".*_cache", ".hypothesis")
)


def copy_checkout(folder: Path) -> Path:
    """Copy this checkout, uncommitted changes included, without its builds and without its tests."""

    def left_out(below: str, names: list[str]) -> set[str]:
        return {*_NOT_CLONED(below, names), *({"tests"} if Path(below) == PROJECT else ())}

    shutil.copytree(PROJECT, folder, ignore=left_out)
    return folder


def use_this_environment(checkout: Path) -> None:
    """Let `./make` find an environment that is complete: this one's packages, which were installed by hash.

    Otherwise it would install them all again, which takes minutes and a package index.
    """
    here, there = Path(sys.prefix), checkout / ".venv"
    there.mkdir()
    for part in here.iterdir():
        if not part.name.startswith("kvplace-"):
            (there / part.name).symlink_to(part)
    environment = Environment(checkout)
    wanted = environment.wanted(list(Section), Constraints.read(checkout / "constraints.txt"))
    environment.stamp.write_text(json.dumps(wanted))


def become_the_previous_release(checkout: Path) -> None:
    """Make an earlier release of a copy: an upgrade from it changes the same things as a release.

    There is no published one. This one has another version in its images, an older sidecar, ledgers
    and topologies with fewer fields and columns, ledgers with claims that the CRD checks and no policy, fewer
    rights, a scheduler that evicts no pod, and another setting.
    """
    this = re.escape(__version__)
    for path in (
        *(checkout / name for name in ("kvplace/__init__.py", "docs/install.md", "docs/quickstart.md")),
        *_files_below(checkout / "manifests"),
    ):
        _edit(path, rf"(?<![\d.]){this}(?!\.?\d)", EARLIER, needed=path.suffix == ".py")
    crd = checkout / "manifests" / "crd"
    # Columns, and the counts that they show.
    _edit(crd / "nodeledgers.yaml", r" {8}- name: (Pods|Owned|Shared)\n( {10}.*\n)+", "")
    _edit(crd / "nodeledgers.yaml", r" {16}summary:\n( {18}.*\n)+", "")
    schema = f"additionalProperties: {json.dumps(EARLIER_CLAIM)}"
    _edit(crd / "nodeledgers.yaml", "x-kubernetes-preserve-unknown-fields: true", schema)
    _edit(checkout / "manifests" / "policy" / "kustomization.yaml", r"- ledger-claims\.yaml\n", "")
    _edit(
        checkout / "kvplace" / "doctor" / "admission_checks.py", r" {4}\"ledger-claims\.kvplace\.io\",\n", ""
    )
    _edit(crd / "nodetopologies.yaml", r" {8}- name: Fingerprint\n( {10}.*\n)+", "")
    rights = checkout / "manifests" / "rbac" / "serve.yaml"
    _edit(rights, r"- apiGroups: \[policy\]\n( {2}.*\n)+", "")
    _edit(checkout / "manifests" / "scheduler" / "configuration.yaml", r" {2}preemptVerb: .*\n", "")
    _edit(checkout / "manifests" / "serve" / "settings.env", r"^STRATEGY=pack$", "STRATEGY=spread")


def _files_below(folder: Path) -> Iterable[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _edit(path: Path, pattern: str, replacement: str, *, needed: bool = True) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    if needed and not count:
        raise ValueError(f"{path} does not match {pattern}, which an upgrade changes there")
    if count:
        path.write_text(text)
