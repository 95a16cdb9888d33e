"""The VMs that somebody wants planned, as JSON lines, or as a list in JSON or YAML.

    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "memory": "32Gi"}
    {"id": "web", "vcpus": 2, "count": 20}

A request has the keys that it has everywhere; beside them stand `id`, which may be left out, and `count`:
so many equal VMs, named web-01 to web-20.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kvplace.core.cluster.planning import VmRequest
from kvplace.core.errors import BadBody
from kvplace.core.request_json import id_of, request_of
from kvplace.core.strict_json import json_object
from kvplace.documents.reading import Part, read_document, read_text

MOST_VMS = 20_000
_KEY = "requests"


def read_wanted(source: str, taken: Iterable[str] = ()) -> tuple[VmRequest, ...]:
    """Read requests from a file, or from stdin for `-`; raises BadBody that names the place.

    `taken` are the ids of VMs that exist already.
    """
    what = "stdin" if source == "-" else source
    return wanted_of(read_text(source, what), what, taken)


def wanted_of(text: str, what: str, taken: Iterable[str] = ()) -> tuple[VmRequest, ...]:
    """Read requests from a text; `what` says in errors where it came from."""
    found: dict[str, VmRequest] = {}
    running = set(taken)
    for number, part in enumerate(_parts(text, what), start=1):
        for vm in _vms(part, number):
            if vm.id in running:
                raise BadBody(f"{part.where}: a VM {vm.id!r} runs in the cluster already; give another id")
            if vm.id in found:
                raise BadBody(
                    f"{part.where}: there is a VM {vm.id!r} already; give every VM an id of its own"
                )
            found[vm.id] = vm
        if len(found) > MOST_VMS:
            raise BadBody(f"{what} asks for more than {MOST_VMS} VMs; plan fewer at once")
    if not found:
        raise BadBody(f'{what} holds no request; write one such as {{"vcpus": 8}} a line')
    return tuple(found.values())


def _parts(text: str, what: str) -> Iterator[Part]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        return
    if lines[0][1].lstrip().startswith("{") and _is_object(lines[0][1]):
        for number, line in lines:
            where = f"{what}, line {number}"
            yield Part(where, json_object(line, what=where, like='{"vcpus": 8}'))
        return
    document = _list(text, what) if lines[0][1].lstrip()[:1] in ("[", "-") else read_document(text, what)
    try:
        document.only(_KEY)
        parts = document.parts(_KEY, MOST_VMS)
    except BadBody as error:
        raise BadBody(f"{what}: {error}") from None
    for part in parts:
        yield Part(f"{what}: {part.where}", part.keys)


def _is_object(line: str) -> bool:
    """Whether the first line is a request by itself; else the text is one document."""
    try:
        return _KEY not in json_object(line, what="")
    except BadBody:
        return False


def _list(text: str, what: str) -> Part:
    """Read a bare list as the only key of a document; lines are counted without the one added."""
    try:
        if text.lstrip().startswith("["):
            return Part("", json_object(f'{{"{_KEY}":\n{text}}}', what=what))
        return read_document(f"{_KEY}:\n{text}", what)
    except BadBody as error:
        sentence = re.sub(r"\bline (\d+)", lambda m: f"line {int(m[1]) - 1}", str(error))
        raise BadBody(re.sub(r" \(char \d+\)| in \"<unicode string>\"", "", sentence)) from None


def _vms(part: Part, number: int) -> Iterator[VmRequest]:
    try:
        name = id_of(part.keys) or f"request-{number}"
        count = Part("", part.keys).count("count", 1, MOST_VMS, 1)
        request = request_of(part.keys, also=("id", "count"))
    except BadBody as error:
        raise BadBody(f"{part.where}: {error}") from None
    if "count" not in part.keys:
        yield VmRequest(name, request)
        return
    width = max(2, len(str(count)))
    for one in range(1, count + 1):
        yield VmRequest(f"{name}-{one:0{width}d}", request)
