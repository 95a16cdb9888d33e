"""The rollout that a command line describes: templates and flags, or one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvplace.core.errors import BadBody
from kvplace.core.strict_json import shown
from kvplace.documents.reading import read_manifests, read_text, source_name
from kvplace.rollout.templates import Rollout, read_rollout, read_template


@dataclass(frozen=True)
class RolloutFlags:
    """The options beside the files; None where not given."""

    name: str | None = None
    count: int | None = None
    names: str | None = None
    """A file with the name of one VM on each line."""
    limits: Mapping[str, Any] | None = None
    """Keys of the document that flags replace."""


def read_given(files: Sequence[str], flags: RolloutFlags, namespace: str | None, default: str) -> Rollout:
    """Read the rollout; `namespace` is the value of -n, `default` counts if flag and document have none.

    Raises BadBody or UsageError.
    """
    found = [(file, where, content) for file in files for where, content in read_manifests(file)]
    if not found:
        raise BadBody(f"{', '.join(map(source_name, files))}: there is no template in it")
    documents = [(file, where, content) for file, where, content in found if "vms" in content]
    if documents:
        if len(found) > 1 or flags.count is not None or flags.names is not None:
            raise click.UsageError(
                f"{documents[0][1]} is a rollout document, which has its own templates, counts and names;"
                " give it alone"
            )
        file, what, content = documents[0]
        folder = Path() if file == "-" else Path(file).parent
        if flags.name is not None:
            content = {**content, "name": flags.name}
    else:
        what, folder = "the rollout", Path()
        content = _of_templates([(where, content) for _, where, content in found], flags)
    content = {**content, **(flags.limits or {})}
    if namespace is not None:
        content["namespace"] = namespace
    named = content.get("namespace") or _namespace_of(found)
    return read_rollout(content, named or default, folder=folder, what=what)


def _of_templates(templates: Sequence[tuple[str, dict[str, Any]]], flags: RolloutFlags) -> dict[str, Any]:
    for where, content in templates:
        read_template(content, where)  # its errors name the file
    own = [_own_name(content) for _, content in templates]
    name = flags.name or (own[0] if len(own) == 1 else None)
    if name is None:
        raise click.UsageError("give the rollout a --name: several templates, or one without metadata.name")
    if len(templates) > 1 and flags.names is not None:
        raise click.UsageError("--names goes with one template; write a rollout document for several")
    vms: list[dict[str, Any]] = []
    for number, (_, content) in enumerate(templates):
        entry: dict[str, Any] = {"template": content}
        if len(templates) > 1:
            entry["name"] = f"{name}-{own[number] or number + 1}"
        if flags.names is not None:
            entry["names"] = _names_in(flags.names)
        elif flags.count is not None:
            entry["count"] = flags.count
        vms.append(entry)
    return {"name": name, "vms": vms}


def _names_in(file: str) -> list[str]:
    """Read a list of names, one on each line, without blank lines and the text after a #."""
    what = source_name(file)
    found: dict[str, int] = {}
    for number, line in enumerate(read_text(file, what).splitlines(), 1):
        name = line.partition("#")[0].strip()
        if name in found:
            raise BadBody(f"{what}: line {number} names {shown(name)} again, as line {found[name]} does")
        if name:
            found[name] = number
    if not found:
        raise BadBody(f"{what} names no VM; write one name on each line")
    return list(found)


def _own_name(content: Mapping[str, Any]) -> str | None:
    name = (content.get("metadata") or {}).get("name")
    return name if isinstance(name, str) and name else None


def _namespace_of(found: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str | None:
    """Return the namespace of the first template that names one."""
    for _, _, content in found:
        metadata = content.get("metadata")
        namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
        if isinstance(namespace, str) and namespace:
            return namespace
    return None
