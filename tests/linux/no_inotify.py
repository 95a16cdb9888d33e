"""A user that has no queue of inotify left."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

TOO_MANY = os.strerror(errno.EMFILE)


def use_up_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel refuse every queue, as after the user's last one."""

    class Refusing:
        def inotify_init1(self, _flags: int) -> int:
            ctypes.set_errno(errno.EMFILE)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
