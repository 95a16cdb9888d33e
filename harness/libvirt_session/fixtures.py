"""The daemons as fixtures, one per test run; a machine that cannot run them skips with the reason."""

from collections.abc import Iterator

import pytest

from harness.libvirt_session.daemon import LibvirtSession, NoLibvirtHere, session_daemon


def _session(*, deny_memory_policy: bool) -> Iterator[LibvirtSession]:
    pytest.importorskip("libvirt", reason="libvirt-python is not installed (./make test installs it)")
    try:
        with session_daemon(deny_memory_policy=deny_memory_policy) as session:
            yield session
    except NoLibvirtHere as reason:
        pytest.skip(f"no real libvirt: {reason}")


@pytest.fixture(scope="session")
def libvirt_session() -> Iterator[LibvirtSession]:
    """A session daemon as in a virt-launcher pod with a seccomp profile that allows memory policies."""
    yield from _session(deny_memory_policy=False)


@pytest.fixture(scope="session")
def libvirt_session_without_memory_policy() -> Iterator[LibvirtSession]:
    """The same under a profile that denies mbind and its kin, as containerd's default one does."""
    yield from _session(deny_memory_policy=True)
