"""The fixtures of the real servers for all tests; under CI a skipped test or module is a failure."""

import signal
from collections.abc import Generator

import hypothesis
import pytest

from dev.step import in_ci
from tests import profiles

pytest_plugins = [
    "harness.build_fixtures",
    "harness.control_plane.fixtures",
    "harness.control_plane.kubevirt_fixtures",
    "harness.emulated_machine.fixtures",
    "harness.libvirt_session.fixtures",
    "harness.pod_cgroup_fixtures",
    "harness.real_node.fixtures",
    "harness.node_programs.fixtures",
    "tests.captured",
    "tests.shared_work",
]

# A parent that runs its jobs in the background has them ignore SIGINT. Every program that a test starts and
# interrupts would inherit that and never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is not a failure: nothing here is judged by the clock.
hypothesis.settings.register_profile(
    "kvplace", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# For ./make quick, and for ./make mutants, which runs the same tests thousands of times.
for name in ("quick", "mutants"):
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=profiles.QUICK_EXAMPLES,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile(profiles.PROFILE)


OF_DEBIAN_PACKAGES = frozenset({"browser", "built", "libvirt", "signing_key"})
"""Fixtures that run programs, or read libraries, of Debian packages."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of these fixtures, so that `./make quick` leaves them out."""
    if OF_DEBIAN_PACKAGES & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.debian_packages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one under CI: there it means that the set-up is broken."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _fail_under_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that is skipped as a whole, as `importorskip` does, into an error under CI."""
    report = yield
    if report.skipped:
        _fail_under_ci(report)
    return report


def _fail_under_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    if in_ci():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} must not be skipped under CI: {reason}"
