"""What every test shares: the fixtures of the real servers, and no skipping where nobody would see it."""

import signal
from collections.abc import Generator

import hypothesis
import pytest

from dev.step import in_ci

pytest_plugins = [
    "harness.control_plane.fixtures",
    "harness.control_plane.kubevirt_fixtures",
    "harness.libvirt_session.fixtures",
]

# A parent that runs its jobs in the background has them ignore SIGINT. Every program that a test starts and
# interrupts would inherit that and never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure: nothing here is judged by the clock.
hypothesis.settings.register_profile("kvplace", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvplace")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skipped test into a failed one under CI: there it means that the set-up is broken."""
    report = yield
    if report.skipped and in_ci() and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} must not be skipped under CI: {reason}"
    return report
