"""The files of the pages: plain HTML, CSS and JavaScript modules from this package, and the colours of VMs.

No build step makes them, and nothing is loaded from elsewhere. They hold no facts about the cluster, so
any client that reaches the listener may have them. They are read once, and compressed once.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvplace.core.drawing.svg_blocks import DARK, LIGHT, Scheme

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PALETTE = "colours.css"


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is served."""

    content: bytes
    zipped: bytes
    type: str
    etag: str


@cache
def page_files() -> dict[str, File]:
    """Read every file, by its name."""
    found = {
        path.name: path.read_bytes()
        for path in (files("kvplace.web") / "pages").iterdir()
        if path.name.rpartition(".")[2] in _TYPES
    }
    found[PALETTE] = palette().encode()
    return {name: _file(name, content) for name, content in sorted(found.items())}


def palette() -> str:
    """Write the colours as CSS variables: light, dark for readers who want it, and either when chosen."""
    return "\n".join(
        [
            f":root {{ {_variables(LIGHT)} color-scheme: light; }}",
            "@media (prefers-color-scheme: dark) {",
            f':root:not([data-theme="light"]) {{ {_variables(DARK)} color-scheme: dark; }}',
            "}",
            f':root[data-theme="dark"] {{ {_variables(DARK)} color-scheme: dark; }}',
            *(f".vm{index} {{ --vm: var(--vm{index}); }}" for index in range(len(LIGHT.vms))),
            "",
        ]
    )


def _variables(scheme: Scheme) -> str:
    colours = {
        "page": scheme.page,
        "package": scheme.package,
        "numa": scheme.numa,
        "l3": scheme.l3,
        "line": scheme.line,
        "ink": scheme.ink,
        "muted": scheme.muted,
        "hatch": scheme.hatch,
        "alarm": scheme.alarm,
        **{f"vm{index}": colour for index, colour in enumerate(scheme.vms)},
    }
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _file(name: str, content: bytes) -> File:
    digest = hashlib.sha256(content).hexdigest()[:20]
    kind = _TYPES[name.rpartition(".")[2]]
    return File(content, gzip.compress(content, 9, mtime=0), f"{kind}; charset=utf-8", f'"{digest}"')
