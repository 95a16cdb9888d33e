"""`kvplace rollout` before it needs a cluster: its output, and bad files, which reach no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from kvplace.cli.rollout_dialog import read_given
from kvplace.core.errors import BadBody
from kvplace.documents.model import read_model
from kvplace.documents.reading import read_document
from kvplace.documents.rollout import RolloutDocument
from tests.cli.calls import Caller
from tests.rollout.examples import vm, vmi


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "web.json"
    path.write_text(json.dumps(vm()))
    return str(path)


def names(files: list[str], **options: Any) -> list[str]:
    return [one.name for one in read_given(files, None, "default", **options).vms]


def test_the_example_is_a_valid_document(kvplace: Caller) -> None:
    answer = kvplace("rollout", "create", "--example")
    assert answer.code == 0
    document = read_model(RolloutDocument, read_document(answer.out, "example"), "example")
    assert document.name == "shop"


def test_vms_are_named_by_flags_lists_templates_and_documents(template: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**vmi(), "metadata": {"name": "db", "annotations": {"cpu-set": "any"}}}))
    listed = tmp_path / "names"
    listed.write_text("alice  # the first\n\nbob\n")
    document = tmp_path / "rollout.yaml"
    document.write_text("name: shop\nvms: [{template: web.json, count: 2}]\n")
    assert names([template], name="web", count=2) == ["web-01", "web-02"]
    assert names([template]) == ["template"]
    assert names([template], name="web", names=str(listed)) == ["alice", "bob"]
    assert names([template, str(other)], name="web", count=1) == [
        "web-template-01", "web-db-01"
    ]  # fmt: skip
    assert names([str(document)]) == ["shop-01", "shop-02"]
    assert names([str(document)], name="new") == ["new-01", "new-02"]
    changed = read_given([str(document)], "mine", "default", limits={"maxInFlight": 7})
    assert (changed.document.max_in_flight, changed.namespace) == (7, "mine")


def test_flags_that_contradict_a_document_are_refused(template: str, tmp_path: Path) -> None:
    document = tmp_path / "rollout.yaml"
    document.write_text("name: shop\nvms: [{template: web.json, count: 2}]\n")
    with pytest.raises(click.UsageError, match=r"rollout\.yaml is a rollout document"):
        names([str(document), template])
    with pytest.raises(click.UsageError, match=r"rollout\.yaml is a rollout document"):
        names([str(document)], count=3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["create", "--yes"], "give a template or a rollout document with -f"),
        (["create", "-f", "x", "--yes", "-A"], "no such option '-A'"),
        (["delete", "web"], "there is no terminal to ask on; give --yes"),
        (["delete", "web", "--yes", "--timeout", "soon"], "--timeout: 'soon' is not a duration"),
        (["create", "-f", "x", "--until", "runing", "--yes"], "did you mean 'running'"),
        (["creat"], "create"),
    ],
)
def test_a_wrong_call_is_one_sentence(kvplace: Caller, arguments: list[str], sentence: str) -> None:
    answer = kvplace("rollout", *arguments)
    assert answer.code == 2
    assert sentence in answer.err
    assert len(answer.err.splitlines()) == 1


def test_faults_of_the_input_are_reported_before_a_missing_yes(
    kvplace: Caller, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "current-context: here\n"
        "clusters: [{name: here, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: me, user: {}}]\n"
        "contexts: [{name: here, context: {cluster: here, user: me}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: Pod\n")
    for file, sentence in (
        (str(tmp_path / "none.yaml"), "none.yaml cannot be read: No such file or directory"),
        (str(wrong), "kind is 'Pod'; it must be VirtualMachine or VirtualMachineInstance"),
        (template, "there is no terminal to ask on; give --yes"),
    ):
        answer = kvplace("rollout", "create", "-f", file, "--name", "web")
        (line,) = answer.err.splitlines()
        assert (answer.code, answer.out) == (2, "")
        assert sentence in line


def test_a_list_that_names_a_vm_twice_is_refused_with_both_lines(template: str, tmp_path: Path) -> None:
    listed = tmp_path / "names"
    listed.write_text("alice\n# the second shift\nbob\nalice # again\n")
    with pytest.raises(BadBody, match="names: line 4 names 'alice' again, as line 1 does"):
        names([template], name="web", names=str(listed))


def test_half_a_character_is_refused_where_it_would_be_sent_to_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "web.json"
    path.write_text(json.dumps(vm()).replace('"spec"', '"\\ud83d": 1, "spec"', 1))
    with pytest.raises(BadBody, match=r"web\.json contains half a character, \\ud83d; write both halves"):
        read_given([str(path)], None, "default")
    path.write_text(json.dumps({**vm(), "note": "\N{ROCKET}"}))
    assert names([str(path)]) == ["template"]


@pytest.mark.parametrize("waves", ["9" * 5000, "0", "1,,2", "-1", "200%"])
def test_a_size_of_a_wave_that_is_none_is_reported_in_a_sentence(
    kvplace: Caller, template: str, tmp_path: Path, waves: str
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:9'}}]\n"
        "contexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
    )
    given = ("rollout", "create", "-f", template, "--kubeconfig", str(kubeconfig), "--waves", waves)
    called = kvplace(*given, "--dry-run")
    assert (called.code, called.out) == (2, "")
    assert "is not a size of a wave; write a number of VMs, or a share such as 10%" in called.err
