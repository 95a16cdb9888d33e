"""Containers appear, change and end in real cgroups; every change is reported once the kernel reports it."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.pod_cgroups import GUARANTEED, PodCgroups, container_id, pod_uid
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.linux.container_watch import ContainerCgroup, ContainerChanges, ContainerWatch
from kvplace.linux.inotify import FileChange, FileReport, Inotify
from kvplace.linux.kernel_files import Gone
from tests.linux.no_inotify import TOO_MANY, use_up_inotify

UID, ID = pod_uid(1), container_id(1)


@pytest.fixture
def watch(pods: PodCgroups) -> Iterator[ContainerWatch]:
    pods.container(pod_uid(9), container_id(9))
    made = ContainerWatch(pods.base)
    yield made
    made.close()


def changes(watch: ContainerWatch) -> ContainerChanges:
    """Wait for the next changes."""
    assert select.select([watch], [], [], 5)[0], "the kernel reported nothing"
    return watch.read()


def test_containers_that_were_there_before_are_known(pods: PodCgroups, watch: ContainerWatch) -> None:
    folder = pods.container(pod_uid(9), container_id(9))
    assert watch.containers == {container_id(9): ContainerCgroup(container_id(9), pod_uid(9), folder)}
    assert watch.read() == ContainerChanges()


@pytest.mark.parametrize("qos", ["burstable", "besteffort", GUARANTEED])
def test_a_new_container_is_reported_with_its_pod(pods: PodCgroups, watch: ContainerWatch, qos: str) -> None:
    folder = pods.container(UID, ID, qos)
    assert changes(watch).appeared == {ID}
    assert watch.containers[ID] == ContainerCgroup(ID, UID, folder)


def test_a_kubelet_that_starts_later_is_seen(pods: PodCgroups) -> None:
    watch = ContainerWatch(pods.base)
    pods.container(UID, ID)
    assert changes(watch).appeared == {ID}
    watch.close()


def test_a_container_that_ends_is_forgotten(pods: PodCgroups, watch: ContainerWatch) -> None:
    folder = pods.container(UID, ID)
    watch.read()
    pods.remove(folder.parent)
    assert changes(watch).appeared == frozenset()
    assert set(watch.containers) == {container_id(9)}


def test_a_container_that_came_and_went_between_two_checks_leaves_nothing(
    pods: PodCgroups, watch: ContainerWatch
) -> None:
    pods.remove(pods.container(UID, ID).parent)
    assert changes(watch).appeared == frozenset()
    assert set(watch.containers) == {container_id(9)}
    pods.container(UID, ID)
    assert changes(watch).appeared == {ID}


def test_a_cgroup_that_is_made_again_at_once_is_a_new_one(pods: PodCgroups, watch: ContainerWatch) -> None:
    folder = pods.container(pod_uid(9), container_id(9))
    pods.remove(folder)
    pods.make(folder)
    assert changes(watch) == ContainerChanges(appeared=frozenset({container_id(9)}))
    writer = pods.process(folder, "sh", "-c", f"echo 1 > {folder}/cpuset.cpus; echo written; exec sleep 600")
    assert writer.stdout is not None
    writer.stdout.readline()
    assert changes(watch).written == {container_id(9)}


def test_a_foreign_client_write_to_a_cpuset_is_reported(pods: PodCgroups, watch: ContainerWatch) -> None:
    folder = pods.container(UID, ID)
    watch.read()
    writer = pods.process(folder, "sh", "-c", f"echo 1 > {folder}/cpuset.cpus; echo written; exec sleep 600")
    assert writer.stdout is not None
    writer.stdout.readline()
    assert changes(watch).written == {ID}


def test_other_files_are_not_reported(pods: PodCgroups, watch: ContainerWatch) -> None:
    folder = pods.container(UID, ID)
    watch.read()
    pods.process(folder)
    assert watch.read() == ContainerChanges()


def test_a_write_to_a_parent_concerns_everything_below(pods: PodCgroups, watch: ContainerWatch) -> None:
    pods.container(UID, ID)
    watch.read()
    pods.hierarchy.set(pods.pod(UID), parse_cpu_list("0"))
    assert changes(watch).everything


def watches(watch: ContainerWatch) -> int:
    """How many folders the kernel watches, of the limited number that root may have watched."""
    return Path(f"/proc/self/fdinfo/{watch.fileno()}").read_text().count("inotify wd:")


def test_the_kernel_watches_nothing_that_has_ended(pods: PodCgroups, watch: ContainerWatch) -> None:
    """It goes on to watch a cgroup that was removed, for ever."""
    pods.container(UID, ID)
    watch.read()
    pods.remove(pods.pod(UID))
    watch.read()
    before = watches(watch)
    for number in range(10, 20):
        pods.container(pod_uid(number), container_id(number))
        watch.read()
        pods.remove(pods.pod(pod_uid(number)))
        watch.read()
    assert watches(watch) == before


def test_a_container_that_has_ended_while_reports_were_lost_is_not_watched(
    pods: PodCgroups, watch: ContainerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = watches(watch)
    pods.container(UID, ID)
    watch.read()
    assert watches(watch) == before + 2
    pods.remove(pods.pod(UID))
    with monkeypatch.context() as lost:
        lost.setattr(Inotify, "read", lambda _: [FileReport(Path(), "", FileChange.OVERFLOW)])
        watch.read()
    assert watches(watch) == before


def test_lost_reports_are_made_up_for(
    pods: PodCgroups, watch: ContainerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods.container(UID, ID)
    pods.remove(pods.pod(pod_uid(9)))
    monkeypatch.setattr(Inotify, "read", lambda _: [FileReport(Path(), "", FileChange.OVERFLOW)])
    found = watch.read()
    assert found == ContainerChanges(frozenset({ID}), everything=True)


def test_a_folder_that_does_not_exist_cannot_be_watched(tmp_path: Path) -> None:
    inotify = Inotify()
    with pytest.raises(Gone):
        inotify.watch(tmp_path / "gone", FileChange.CREATED)
    inotify.close()


def test_the_limit_of_watches_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited:
        def inotify_init1(self, _flags: int) -> int:
            return os.open(os.devnull, os.O_RDONLY)

        def inotify_add_watch(self, *_arguments: object) -> int:
            ctypes.set_errno(errno.ENOSPC)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Limited())
    inotify = Inotify()
    with pytest.raises(Misconfigured, match=r"fs\.inotify\.max_user_watches"):
        inotify.watch(tmp_path, FileChange.CREATED)
    inotify.close()


def test_containers_are_found_by_checking_where_the_limit_of_queues_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs of root use them up, and the limit is 128 where no client has raised it."""
    use_up_inotify(monkeypatch)
    folder = tmp_path / f"kubepods/burstable/pod{UID}/{ID}"
    with closing(ContainerWatch(tmp_path)) as watch:
        assert watch.obstacle == f"inotify cannot be used: {TOO_MANY}; see fs.inotify.max_user_instances"
        folder.mkdir(parents=True)
        assert not select.select([watch], [], [], 0)[0]
        watch.look_everywhere()
        assert set(watch.containers) == {ID}
        folder.rmdir()
        watch.look_everywhere()
        assert (dict(watch.containers), watch.read()) == ({}, ContainerChanges())


def test_a_container_that_cannot_be_watched_is_known_and_the_reason_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"kubepods/burstable/pod{UID}/{ID}"
    folder.mkdir(parents=True)
    watch_folder = Inotify.watch

    def limited(self: Inotify, path: Path, changes: FileChange) -> None:
        if path == folder:
            raise Misconfigured(f"{path} cannot be watched: raise fs.inotify.max_user_watches")
        watch_folder(self, path, changes)

    monkeypatch.setattr(Inotify, "watch", limited)
    with closing(ContainerWatch(tmp_path)) as watch:
        assert set(watch.containers) == {ID}
        assert "max_user_watches" in watch.obstacle
        monkeypatch.setattr(Inotify, "watch", watch_folder)
        watch.look_everywhere()
        assert watch.obstacle == ""
