"""Where the cgroup of a container is that an OCI runtime spec names.

Asking /proc of its first process instead would need that process to live, and the host's cgroup namespace.
"""

from __future__ import annotations

from pathlib import Path

_SLICE = ".slice"


def cgroup_folder(hierarchy: Path, cgroups_path: str) -> Path | None:
    """Return the folder of `linux.cgroupsPath` in a mounted hierarchy; None for one that runtimes do not use.

    It is a path, or with the systemd driver `slice:prefix:name`, which stands for the scope `prefix-name` in
    that slice. The slice `a-b.slice` is inside `a.slice` (systemd.slice(5)).
    """
    slice_, colon, scope = cgroups_path.partition(":")
    if not colon:
        parts = cgroups_path.split("/")
    else:
        prefix, _, name = scope.partition(":")
        parts = [*_slices(slice_), f"{prefix}-{name}.scope" if prefix else f"{name}.scope"]
    parts = [part for part in parts if part]
    return None if not parts or ".." in parts else hierarchy.joinpath(*parts)


def _slices(name: str) -> list[str]:
    """List a slice with those that it is in, outermost first; `-.slice` is the root."""
    words = name.removesuffix(_SLICE).split("-")
    return ["-".join(words[:count]) + _SLICE for count in range(1, len(words) + 1) if all(words)]
