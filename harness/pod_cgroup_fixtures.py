"""The cgroups of pods as a pytest fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.pod_cgroups import Driver, PodCgroups, pod_cgroups
from kvplace.core.errors import Misconfigured


@pytest.fixture(params=list(Driver), ids=lambda driver: driver.value)
def pods(request: pytest.FixtureRequest) -> Iterator[PodCgroups]:
    """A tree of real cgroups for one test, as kubelets with each of the two drivers lay it out."""
    driver = request.param
    assert isinstance(driver, Driver)
    try:
        with pod_cgroups(driver) as made:
            yield made
    except (Misconfigured, PermissionError) as error:
        pytest.skip(f"no cpuset cgroup can be made here, which needs root: {error}")
