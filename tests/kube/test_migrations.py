"""Migrations that kvplace creates have names that the API server accepts, whatever the VM is called."""

from __future__ import annotations

import re

import pytest

from kvplace.core.scalars import NodeName
from kvplace.kube.migrations import NAME_PREFIX, PlannedMigration

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@pytest.mark.parametrize("vmi", ["db", "a" * 253, f"{'a' * 199}.b", f"{'a' * 198}-.b", f"{'a' * 197}.-.b"])
def test_the_name_of_a_migration_is_a_dns_subdomain_with_the_name_of_its_vm(vmi: str) -> None:
    planned = PlannedMigration.of("demo", vmi, NodeName("worker"), "0f1e2d3c")
    assert SUBDOMAIN.fullmatch(planned.name)
    assert len(planned.name) <= 253
    assert planned.name.startswith(NAME_PREFIX + vmi[:190])
    assert planned.name.endswith("-0f1e2d3c")
    assert (planned.vmi, planned.target) == (vmi, "worker")
