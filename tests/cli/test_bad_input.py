"""Every command answers an invalid file with one sentence, and never hangs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.calls import COMMAND, Called, Caller, call_process

NODE = {"id": 0, "cpus": "0-3", "memory": "16Gi"}
MACHINE = {
    "packages": [{"id": 0, "cpus": "0-3"}],
    "numaNodes": [NODE],
    "l3Groups": ["0-3"],
    "cores": ["0-1", "2-3"],
}
READERS = (
    ("topology", "{}"),
    ("map", "{}", "-o", "svg"),
    ("place", "--topology", "{}"),
    ("plan", "--cluster", "{}", "--requests", "-"),
    ("plan", "--requests", "{}"),
    ("simulate", "--scenario", "{}"),
    ("map", "epyc-7502p", "--placements", "{}"),
    ("topology", "epyc-7502p", "--cpu-manager-state", "{}"),
    ("rewrite", "--domain", "{}", "--cpu-map", '{"socket0": ["0"]}'),
    ("rewrite", "--domain", "domain.xml", "--placement", "{}"),
    ("rewrite", "--domain", "domain.xml", "--cpu-map", '{"socket0": ["0"]}', "--vmi", "{}"),
    ("serve", "--config", "{}"),
    ("explain", "-f", "{}"),
    ("get", "vms", "--kubeconfig", "{}"),
)
FROM_STDIN = tuple(arguments for arguments in READERS if arguments[0] not in ("place", "get"))
CONTENTS = {
    "nothing": b"",
    "blanks": b"\n \n",
    "null": b"null",
    "a number": b"42",
    "a text": b'"text"',
    "an empty list": b"[]",
    "a list of nothing": b"[null]",
    "half a document": b'{"nodes": [',
    "a NUL byte at the end": b'{"nodes": []}\0',
    "UTF-16": '{"nodes": []}'.encode("utf-16"),
    "tabs": b"nodes:\ta\n\tb: c",
    "another kind": b"apiVersion: example.org/v9\nkind: Other\nmetadata: {name: x}\n",
    "nothing but zeros": b"\0" * 100,
    "every byte": bytes(range(256)),
    "deep JSON": b'{"a":' * 100_000,
    "deep YAML": b"a: " + b"{a: " * 5_000,
    "a key twice": b'{"nodes": [], "nodes": []}',
    "no number": b'{"nodes": NaN}',
    "a number of 6000 digits": b"nodes: " + b"9" * 6_000,
    "YAML that unfolds": b"a: &a [x, x]\nb: [*a, *a]\n",
    "a tag that runs code": b'a: !!python/object/apply:os.system ["true"]\n',
    "a tag with junk": b"a: !!timestamp x\n",
    "another tag with junk": b"a: !!bool zz\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a date that is none": b"nodes: 2001-99-99\n",
    "a date as a key": b"socket0: [{2001-01-01: 2}]\nplaced: [{placement: {2001-01-01: 2}}]\n",
    "a date as a value": b"socket0: [2001-01-01]\nplaced: [{placement: 2001-01-01}]\n",
    "a number as a key of the one object of a list": b"kind: List\nitems: [{1: 2}]\n",
    "pages of no size": b"spec: {claims: {u: {hugePages: {0: {null: 3}}}}}\n",
    "an entity": b'<!DOCTYPE a [<!ENTITY a "b">]><capabilities>&a;</capabilities>',
    "deep XML": b"<a>" * 100_000,
    "half an archive": b"\x1f\x8b" + b"\0" * 50,
    "a surrogate alone": b'{"kind": "\\ud800", "metadata": {"name": "\\ud800"}, "spec": []}',
}


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_an_invalid_file_is_refused_in_one_short_sentence(
    kvplace: Caller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    content: bytes,
) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    Path("domain.xml").write_text("<domain><vcpu>1</vcpu></domain>")
    given = [str(junk) if argument == "{}" else argument for argument in arguments]
    is_one_sentence(kvplace(*given, stdin='{"vcpus": 1}\n'))


@pytest.mark.parametrize("arguments", FROM_STDIN, ids=" ".join)
@pytest.mark.parametrize("name", ["nothing", "every byte", "half a document", "a key twice", "a text"])
def test_so_is_invalid_input_on_stdin(
    kvplace: Caller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("domain.xml").write_text("<domain><vcpu>1</vcpu></domain>")
    Path("vms").write_text('{"vcpus": 1}\n')
    given = [{"{}": "-", "-": "vms"}.get(argument, argument) for argument in arguments]
    called = kvplace(*given, stdin=CONTENTS[name])
    is_one_sentence(called)
    assert "stdin" in called.err or "--" in called.err


def is_one_sentence(called: Called) -> None:
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("kvplace: ")
    assert called.err.count("\n") == 1
    assert len(called.err) < 700


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_a_folder_and_a_file_that_is_not_there_are_refused_too(
    kvplace: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("domain.xml").write_text("<domain><vcpu>1</vcpu></domain>")
    Path("folder").mkdir()
    for name in ("./folder", "./none"):
        given = [name if argument == "{}" else argument for argument in arguments]
        is_one_sentence(kvplace(*given, stdin='{"vcpus": 1}\n'))


def test_an_empty_machine_name_is_not_the_current_folder(kvplace: Caller) -> None:
    called = kvplace("topology", "")
    assert (called.code, called.out) == (2, "")
    assert "the name of the machine is empty" in called.err


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_an_endless_file_is_refused(
    kvplace: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("domain.xml").write_text("<domain><vcpu>1</vcpu></domain>")
    given = ["/dev/zero" if argument == "{}" else argument for argument in arguments]
    called = kvplace(*given, stdin='{"vcpus": 1}\n')
    assert called.code == 2
    assert "/dev/zero" in called.err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"memory": "9" * 5_000}, "is not a quantity such as 8Gi"),
        ({"memory": "16gib"}, "'16gib' is not a quantity"),
        ({"memory": -1}, "-1 is negative"),
        ({"memory": 1e30}, "must be a quantity such as 8Gi"),
        ({"cpus": "0-999999999999"}, "is above the highest id 16383"),
        ({"hugePages": {"0": 1}}, "'0' is not a page size"),
        ({"distances": {"x": 1}}, "is not the id of a NUMA node"),
    ],
)
def test_an_impossible_number_is_refused_with_its_key(
    kvplace: Caller, tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE | {"numaNodes": [NODE | changed]}))
    called = kvplace("topology", str(file))
    assert called.code == 2
    assert "numaNodes[0]." in called.err
    assert words in called.err
    assert len(called.err) < 500


def test_a_file_name_that_is_not_utf_8_is_printed_safely(tmp_path: Path) -> None:
    file = tmp_path / "\udcff\x1b[31m.json"
    file.write_text(json.dumps(MACHINE))
    for form in ("name", "table", "json"):
        called = call_process("topology", str(file), "-o", form)
        assert called.code == 0
        assert ("the node is named 31m: " in called.err) is (form != "table")
        assert "\x1b" not in called.out + called.err


@pytest.mark.parametrize("form", ["table", "wide", "json", "svg"])
def test_a_vm_whose_name_the_terminal_cannot_write_is_drawn(form: str) -> None:
    placed = call_process(
        "place", "--topology", "epyc-7502p", "--keep", "-o", "json", stdin='{"id": "データ", "vcpus": 2}\n'
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    called = call_process(
        "map", "epyc-7502p", "--placements", "-", "-o", form, stdin=placed.out, environment=ascii_only
    )
    assert (called.code, called.err) == (0, "")
    assert called.out.isascii()


@pytest.mark.parametrize(
    ("command", "redirected", "words"),
    [
        ("topology epyc-7502p", ">&-", "stdout is closed"),
        ("map epyc-7502p -o svg", ">/dev/full", "stdin or stdout cannot be read or written: No space left"),
        ("place --topology epyc-7502p", ">/dev/full", "cannot be read or written: No space left"),
        ("plan --requests -", "<&-", "<stdin> contains no requests"),
    ],
)
def test_a_closed_or_full_stream_is_one_sentence(command: str, redirected: str, words: str) -> None:
    line = f"{shlex.join(COMMAND)} {command} {redirected}"
    stdin = None if redirected.startswith("<") else '{"vcpus": 1}\n'
    done = subprocess.run(["sh", "-c", line], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("kvplace: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["Pod", "Deployment", "List"])
@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["plan", "--requests", "-", "--cluster", "cluster.yaml"], "nodes"),
        (["simulate", "--scenario", "-"], "nodes, mix"),
        (["place", "--topology", "epyc-7502p"], "id, free"),
    ],
)
def test_a_kubernetes_object_where_another_document_is_expected_is_called_one(
    kvplace: Caller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: list[str],
    keys: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}})
    (tmp_path / "cluster.yaml").write_text(text)
    called = kvplace(*arguments, stdin=text)
    assert called.code == 2
    said = called.err + called.out
    assert f"it is a Kubernetes object of kind '{kind}'; expected is a document with the keys {keys}" in said


def test_a_kubeconfig_whose_name_is_too_long_for_a_file_does_not_exist(kvplace: Caller) -> None:
    called = kvplace("get", "nodes", "--kubeconfig", "x" * 300)
    assert (called.code, called.out) == (2, "")
    assert "does not exist: give another one with --kubeconfig or KUBECONFIG" in called.err
    assert called.err.count("\n") == 1
