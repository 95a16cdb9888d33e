"""The hook's answer to each of KubeVirt's calls."""

from __future__ import annotations

import pytest

from kvplace.core.errors import GrpcStatus
from kvplace.core.protobuf import bytes_field
from kvplace.hook.services import CallRefused, DefineDomain, Reply, answer
from tests.hook.conftest import HookProcess
from tests.hook.grpc_client import DEFINE, SocketCaller, define, domain_of
from tests.hook.machine import DOMAIN, ON_THIS_MACHINE, VMI

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


def test_a_plugin_of_kubevirt_changes_domains() -> None:
    # MutateDomainRequest {string domain_type=1; bytes domain=2; bytes vmi=3; message sidecar_context=4}
    message = b"".join(bytes_field(number, text) for number, text in enumerate(("libvirt", "<d/>", "{}"), 1))
    path = "/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain"
    assert answer(path, message + bytes_field(4, b"\x0a\x04Boot")) == DefineDomain(b"<d/>", b"{}")


def test_a_plugin_gets_the_same_domain_at_the_socket_that_it_states(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.environ["KVPLACE_SOCKET_NAME"] = "hook.sock"
    hook.start()
    message = bytes_field(1, "libvirt") + bytes_field(2, DOMAIN) + bytes_field(3, VMI)
    with SocketCaller(hook.root / "hooks/hook.sock") as caller:
        mutated = caller.ask("/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain", message)
        assert domain_of(mutated.message) == domain_of(caller.ask(DEFINE, define()).message)
    assert b"vcpupin" in domain_of(mutated.message)


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
