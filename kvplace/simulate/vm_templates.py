"""The VM templates of `vm-templates/`, and the many VMs in mixed sizes that a demo makes from them.

The templates are at the top of the project, and inside the installed package. Equal seeds make equal VMs.
Among many VMs three have mistakes that real users make and must be refused.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvplace.core.errors import Misconfigured

_FOLDER = "vm-templates"

Json = dict[str, Any]
_SHARES = {
    "web-server": 28,
    "ci-runner": 16,
    "game-server": 16,
    "batch-worker": 12,
    "database": 9,
    "network-function": 9,
    "trading-engine": 7,
    "analytics": 3,
}
"""How often each template is used, in percent."""
_CORES = {"web-server": (2, 4, 4, 8), "database": (8, 16, 24), "analytics": (32, 48, 64)}
"""Cores to draw from; other templates keep their size."""
_FEWEST_WITH_MISTAKES = 20


def read_templates() -> dict[str, dict[str, Any]]:
    """Read every template by its name, in the order of the names.

    Raises Misconfigured when this installation has none.
    """
    from kvplace.documents.reading import read_document

    return {
        entry.name.removesuffix(".yaml"): read_document(entry.read_text(encoding="utf-8"), entry.name)
        for entry in sorted(_folder().iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def _folder() -> Traversable:
    inside = files("kvplace.simulate") / _FOLDER
    if inside.is_dir():
        return inside
    beside = Path(__file__).resolve().parents[2] / _FOLDER
    if beside.is_dir():
        return beside
    raise Misconfigured(f"this installation of kvplace has no {_FOLDER}; reinstall it")


def demo_vms(templates: Mapping[str, Json], count: int, seed: int) -> list[Json]:
    """Make so many VMs, named after their template and numbered."""
    chance = random.Random(seed)
    names = [name for name in _SHARES if name in templates]
    chosen = chance.choices(names, weights=[_SHARES[name] for name in names], k=count)
    vms = [_vm(templates[name], f"{name}-{number:03d}", chance) for number, name in enumerate(chosen, 1)]
    if has_mistakes(count):
        for (name, mistake), number in zip(_MISTAKES, (count // 4, count // 2, count * 3 // 4), strict=True):
            if name in templates:
                vms[number] = _vm(templates[name], f"{name}-{number + 1:03d}", chance)
                mistake(vms[number]["spec"]["template"])
    return vms


def has_mistakes(count: int) -> bool:
    """Whether so many VMs are enough for three of them to be wrong."""
    return count >= _FEWEST_WITH_MISTAKES


def _vm(template: Json, name: str, chance: random.Random) -> Json:
    vm = copy.deepcopy(template)
    vm["metadata"]["name"] = name
    domain = vm["spec"]["template"]["spec"]["domain"]
    kind = template["metadata"]["name"]
    if kind in _CORES:
        before = domain["cpu"]["cores"]
        domain["cpu"]["cores"] = chance.choice(_CORES[kind])
        memory = int(domain["memory"]["guest"].removesuffix("Gi")) * domain["cpu"]["cores"] // before
        domain["memory"]["guest"] = f"{memory}Gi"
    return vm


def _misspelt(template: Json) -> None:
    template["metadata"]["annotations"]["cpu-set"] = "one-soket"


def _wider_than_any_numa_node(template: Json) -> None:
    template["spec"]["domain"]["cpu"]["cores"] = 250


def _more_huge_pages_than_any_numa_node(template: Json) -> None:
    template["spec"]["domain"]["memory"]["guest"] = "256Gi"


_MISTAKES: tuple[tuple[str, Callable[[Json], None]], ...] = (
    ("network-function", _more_huge_pages_than_any_numa_node),
    ("trading-engine", _wider_than_any_numa_node),
    ("web-server", _misspelt),
)
