"""Two builds of one source are equal, wherever and whenever they are made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.node_programs.image import layers_of
from harness.node_programs.kvplace_images import hook_image
from release.archives import write_tar_gz
from release.software_list import software_list

pytestmark = pytest.mark.timeout(1200)

DATE = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def other_umask() -> Iterator[None]:
    """Make files that the group may write."""
    with umask(0o002):
        yield


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.debian_packages
def test_an_image_that_is_built_again_under_another_umask_has_the_same_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with umask(0o022), skipped_if_not_installed():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
        first = layers_of(hook_image())
    with umask(0o002):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        second = layers_of(hook_image())
    assert first[0].parent != second[0].parent
    assert [layer.name for layer in first] == [layer.name for layer in second]
    lists = [software_list("hook", "1", "sha256:00", layers, DATE) for layers in (first, second)]
    assert lists[0] == lists[1]


@pytest.mark.usefixtures("other_umask")
def test_an_archive_does_not_state_when_or_by_whom_its_files_were_made(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700 if name == "one" else 0o775)
        (folder / "b").write_text("b")
        (folder / "a").write_text("a")
        os.utime(folder / "a", (1, 1) if name == "one" else (2, 2))
        write_tar_gz(tmp_path / f"{name}.tar.gz", folder, "top", DATE)
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
