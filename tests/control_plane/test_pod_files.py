"""The files and variables that a container is given of its pod, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.control_plane.pod_files import (
    NotPlayed,
    PodVolumes,
    environment,
    expand,
    field_value,
    write_atomically,
)

POD: dict[str, Any] = {
    "metadata": {
        "name": "vm",
        "namespace": "ns",
        "uid": "u-1",
        "annotations": {"cpu-map": '{"socket0":["1"]}', "a/b": "two\nlines"},
        "labels": {},
    },
    "spec": {"nodeName": "n1", "volumes": [], "containers": []},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.annotations['cpu-map']", '{"socket0":["1"]}'),
        ("metadata.annotations['missing']", ""),
        ("metadata.labels['missing']", ""),
        ("metadata.uid", "u-1"),
        ("spec.nodeName", "n1"),
        ("metadata.annotations", 'a/b="two\\nlines"\ncpu-map="{\\"socket0\\":[\\"1\\"]}"'),
    ],
)
def test_a_field_reads_as_a_kubelet_writes_it(path: str, value: str) -> None:
    assert field_value(POD, path) == value


def test_a_field_that_is_not_played_is_named_instead_of_being_empty() -> None:
    with pytest.raises(NotPlayed, match=r"spec\.hostUsers"):
        field_value(POD, "spec.hostUsers")


def test_later_variables_see_earlier_ones_and_a_doubled_dollar_is_one() -> None:
    container = {
        "name": "main",
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "value": "$(A)$(C) $$(A) $A"},
            {"name": "C", "value": "$(B)"},
        ],
    }
    assert environment(POD, container) == {"A": "1", "B": "1$(C) $(A) $A", "C": "1$(C) $(A) $A"}


@given(st.text(alphabet="ab()", max_size=20))
def test_text_without_a_dollar_stays_as_it_is(text: str) -> None:
    assert expand(text, {"a": "x", "b": "y"}) == text


def test_files_of_a_volume_change_together_and_old_ones_go(tmp_path: Path) -> None:
    assert write_atomically(tmp_path, {"map": ("1", 0o644), "pod/uid": ("u-1", 0o600)})
    first = (tmp_path / "..data").resolve()
    assert not write_atomically(tmp_path, {"map": ("1", 0o644), "pod/uid": ("u-1", 0o600)}), "nothing changed"
    assert (tmp_path / "..data").resolve() == first

    assert write_atomically(tmp_path, {"map": ("2", 0o644), "pod/uid": ("u-1", 0o600)})
    assert (tmp_path / "map").read_text() == "2"
    assert (tmp_path / "pod" / "uid").read_text() == "u-1"
    assert (tmp_path / "pod" / "uid").stat().st_mode & 0o777 == 0o600
    assert not first.exists()


def test_a_downward_volume_is_mounted_read_only_and_an_empty_one_as_the_pod_reports(tmp_path: Path) -> None:
    item = {"path": "map", "fieldRef": {"fieldPath": "metadata.annotations['cpu-map']"}}
    volumes = [
        {"name": "podinfo", "downwardAPI": {"items": [item]}},
        {"name": "all", "projected": {"sources": [{"downwardAPI": {"items": [item]}}]}},
        {"name": "hooks", "emptyDir": {}},
    ]
    mounts = [
        {"name": "hooks", "mountPath": "/var/run/hooks", "subPath": "side-0"},
        {"name": "podinfo", "mountPath": "/etc/podinfo"},
        {"name": "all", "mountPath": "/etc/all"},
    ]
    pod = {**POD, "spec": {**POD["spec"], "volumes": volumes}}
    on_disk = PodVolumes(tmp_path)
    on_disk.refresh(pod)
    seen = {mount.target: mount for mount in on_disk.mounts(pod, {"name": "main", "volumeMounts": mounts})}
    assert list(seen) == ["/etc/all", "/etc/podinfo", "/var/run/hooks"]
    assert [mount.read_only for mount in seen.values()] == [True, True, False]
    assert (seen["/etc/podinfo"].source / "map").read_text() == '{"socket0":["1"]}'
    assert (seen["/etc/all"].source / "map").read_text() == '{"socket0":["1"]}'
    assert seen["/var/run/hooks"].source == tmp_path / "hooks" / "side-0"


def test_a_volume_that_is_not_played_is_named(tmp_path: Path) -> None:
    pod = {**POD, "spec": {**POD["spec"], "volumes": [{"name": "keys", "secret": {"secretName": "s"}}]}}
    container = {"name": "main", "volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}
    with pytest.raises(NotPlayed, match=r"volume keys \(secret\)"):
        PodVolumes(tmp_path).mounts(pod, container)
