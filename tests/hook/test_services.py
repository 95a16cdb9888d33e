"""The hook's answer to each of KubeVirt's calls."""

from __future__ import annotations

import pytest

from kvplace.core.errors import GrpcStatus
from kvplace.hook.protobuf import bytes_field
from kvplace.hook.services import CallRefused, DefineDomain, Reply, answer

# InfoResult {string name=1; repeated HookPoint hookPoints=3; repeated string versions=4}
# HookPoint {string name=1; int32 priority=2}
INFO_RESULT = (
    b"\x0a\x07kvplace"
    b"\x1a\x10\x0a\x0eOnDefineDomain"
    b"\x1a\x0a\x0a\x08Shutdown"
    b"\x22\x08v1alpha1\x22\x08v1alpha2\x22\x08v1alpha3"
)


def test_info_offers_every_version_and_only_the_hook_points_that_are_ours() -> None:
    assert answer("/kubevirt.hooks.info.Info/Info", b"") == Reply(INFO_RESULT)


@pytest.mark.parametrize("version", ["v1alpha1", "v1alpha2", "v1alpha3"])
def test_every_version_defines_domains(version: str) -> None:
    asked = answer(
        f"/kubevirt.hooks.{version}.Callbacks/OnDefineDomain", bytes_field(1, "<d/>") + bytes_field(2, "{}")
    )
    assert asked == DefineDomain(b"<d/>", b"{}")


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3"])
def test_cloud_init_data_comes_back_unchanged(version: str) -> None:
    path = f"/kubevirt.hooks.{version}.Callbacks/PreCloudInitIso"
    source, vmi, data = bytes_field(1, "source"), bytes_field(2, "vmi"), bytes_field(3, "data")
    assert answer(path, source + vmi + data) == Reply(source + data)
    assert answer(path, vmi) == Reply(b"")


def test_shutdown_is_the_last_answer() -> None:
    assert answer("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown", b"") == Reply(b"", last=True)


@pytest.mark.parametrize(
    "path",
    [
        "/kubevirt.hooks.v1alpha1.Callbacks/Shutdown",
        "/kubevirt.hooks.v1alpha1.Callbacks/PreCloudInitIso",
        "/kubevirt.hooks.v1alpha2.Callbacks/Shutdown",
        "/kubevirt.hooks.v1alpha4.Callbacks/OnDefineDomain",
        "/",
        "",
    ],
)
def test_methods_that_a_version_lacks_are_unimplemented(path: str) -> None:
    with pytest.raises(CallRefused) as caught:
        answer(path, b"")
    assert caught.value.status is GrpcStatus.UNIMPLEMENTED


def test_a_broken_message_is_an_invalid_argument() -> None:
    with pytest.raises(CallRefused, match="Info: a number in the message is cut off") as caught:
        answer("/kubevirt.hooks.info.Info/Info", b"\xff")
    assert caught.value.status is GrpcStatus.INVALID_ARGUMENT
