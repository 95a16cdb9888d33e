"""The files of a container from its kubelet: its environment and its volumes as files.

Only the sources that the pods under test use are played: the downward API in both forms, empty folders, and
images (as empty folders). Anything else is named in an error instead of being left out quietly, because a
container that misses a variable or a file fails much later and far away.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_KEYED = re.compile(r"metadata\.(annotations|labels)\['(.+)'\]")
_REFERENCE = re.compile(r"\$(\$|\(([^()]+)\))")
_DEFAULT_MODE = 0o644


class NotPlayed(Exception):
    """The pod wants something of its kubelet that a hollow node does not do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of this machine and where the container sees it."""

    source: Path
    target: str
    read_only: bool


def field_value(pod: Json, path: str) -> str:
    """Resolve a fieldRef; a missing label or annotation is the empty string, as with a kubelet."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata[path.removeprefix("metadata.")])
        case "metadata.annotations" | "metadata.labels":
            entries = metadata.get(path.removeprefix("metadata."), {})
            return "\n".join(
                f"{key}={json.dumps(entries[key], ensure_ascii=False)}" for key in sorted(entries)
            )
        case "spec.nodeName":
            return str(spec["nodeName"])
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName", ""))
        case "status.hostIP" | "status.podIP":
            return str(status.get(path.removeprefix("status."), ""))
        case _:
            raise NotPlayed(f"fieldRef {path}")


def environment(pod: Json, container: Json) -> dict[str, str]:
    """Resolve a container's `env`, later entries seeing earlier ones through $(NAME)."""
    if container.get("envFrom"):
        raise NotPlayed(f"envFrom of container {container['name']}")
    resolved: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom")
        if source is None:
            resolved[entry["name"]] = expand(entry.get("value", ""), resolved)
        elif "fieldRef" in source:
            resolved[entry["name"]] = field_value(pod, source["fieldRef"]["fieldPath"])
        else:
            raise NotPlayed(f"valueFrom {', '.join(source)} of environment variable {entry['name']}")
    return resolved


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by its value; unknown names stay as they are and $$ is a dollar."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _REFERENCE.sub(replacement, text)


class PodVolumes:
    """The volumes of one pod below a folder, one sub-folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refresh(self, pod: Json) -> None:
        """Make missing files and bring downward API files up to date; unchanged ones are not touched."""
        for volume in pod["spec"].get("volumes", []):
            place = self.folder / volume["name"]
            payload = _downward_payload(pod, volume)
            if payload is not None:
                place.mkdir(parents=True, exist_ok=True)
                write_atomically(place, payload)
            elif not place.exists():
                place.mkdir(parents=True)
                # Every user that the container runs as may write, as in a kubelet's emptyDir.
                place.chmod(0o777)

    def mounts(self, pod: Json, container: Json) -> tuple[Mount, ...]:
        """List the mounts of the container; parents come before the mounts inside them."""
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounts = []
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if _kind(volume) == "not played":
                raise NotPlayed(f"volume {volume['name']} ({', '.join(volume.keys() - {'name'})})")
            source = self.folder / mount["name"]
            if mount.get("subPath"):
                source /= mount["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o777)
            read_only = mount.get("readOnly", False) or _kind(volume) == "downward"
            mounts.append(Mount(source, mount["mountPath"], read_only))
        return tuple(sorted(mounts, key=lambda mount: mount.target))

    def remove(self) -> None:
        """Remove all files of the pod."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write_atomically(folder: Path, payload: Mapping[str, tuple[str, int]]) -> bool:
    """Put files into a volume so that a reader sees all of the old or all of the new; False when nothing
    changed.

    The layout is the kubelet's: `NAME -> ..data/NAME`, `..data -> ..TIMESTAMP`, and `..data` is replaced by
    a rename.
    """
    current = folder / "..data"
    if current.exists() and all(
        (current / path).is_file() and (current / path).read_text() == text
        for path, (text, _) in payload.items()
    ):
        return False
    fresh = folder / f"..{secrets.token_hex(8)}"
    for path, (text, mode) in payload.items():
        file = fresh / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
    old = current.resolve() if current.exists() else None
    swap = folder / "..data_tmp"
    swap.symlink_to(fresh.name)
    swap.rename(current)
    for top in {Path(path).parts[0] for path in payload}:
        link = folder / top
        if not link.is_symlink():
            link.symlink_to(os.path.join("..data", top))  # noqa: PTH118 - relative to the link
    if old is not None:
        shutil.rmtree(old)
    return True


def _kind(volume: Json) -> str:
    if "downwardAPI" in volume or "projected" in volume:
        return "downward"
    # A claim's volume is a folder without content here: nothing in these pods reads a disk.
    played = {"emptyDir", "image", "persistentVolumeClaim"}
    return "empty" if played & volume.keys() else "not played"


def _downward_payload(pod: Json, volume: Json) -> dict[str, tuple[str, int]] | None:
    """Return path -> (text, mode) of a volume that is filled from the pod itself, None for other volumes."""
    if "downwardAPI" in volume:
        sources, default = [volume["downwardAPI"]], volume["downwardAPI"].get("defaultMode", _DEFAULT_MODE)
    elif "projected" in volume:
        projected = volume["projected"]
        # Tokens and certificates are left out: processes under test get theirs from the control plane.
        sources = [
            source["downwardAPI"] for source in projected.get("sources", []) if "downwardAPI" in source
        ]
        default = projected.get("defaultMode", _DEFAULT_MODE)
    else:
        return None
    payload = {}
    for item in (item for source in sources for item in source.get("items", [])):
        if "fieldRef" not in item:
            raise NotPlayed(f"resourceFieldRef of {item['path']} in volume {volume['name']}")
        text = field_value(pod, item["fieldRef"]["fieldPath"])
        payload[item["path"]] = (text, item.get("mode", default))
    return payload
