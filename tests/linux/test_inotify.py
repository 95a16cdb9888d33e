"""Changes of folders, and the reason why there are no reports of them."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest

from kvplace.core.errors import Misconfigured
from kvplace.linux.inotify import FileChange, FileReport, Inotify, noticing
from tests.linux.no_inotify import use_up_inotify


def test_a_user_without_queues_gets_no_reports_and_the_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_up_inotify(monkeypatch)
    with closing(Inotify()) as inotify:
        with pytest.raises(Misconfigured, match="max_user_instances"):
            inotify.watch(tmp_path, FileChange.WRITTEN)
        inotify.forget(tmp_path)
        assert inotify.read() == []


async def test_folders_that_do_not_exist_are_left_out_and_an_obstacle_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[FileReport] = []
    with noticing(reports.extend, [tmp_path / "missing"], FileChange.WRITTEN, "files are compared"):
        assert caplog.records == []
    use_up_inotify(monkeypatch)
    with (
        caplog.at_level(logging.WARNING),
        noticing(reports.extend, [tmp_path], FileChange.WRITTEN, "poll"),
    ):
        assert "max_user_instances; poll" in caplog.text
