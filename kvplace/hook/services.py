"""KubeVirt's calls and the hook's answers, apart from the rewritten domain.

Messages as in kubevirt `pkg/hooks/info/api_info.proto` and `pkg/hooks/v1alpha{1,2,3}/api_*.proto`:

    kubevirt.hooks.info.Info           Info             name and versions, before libvirt starts, within 1 s
    kubevirt.hooks.v1alpha1.Callbacks  OnDefineDomain   domain and VMI in, domain out, thrice a boot at most
    kubevirt.hooks.v1alpha2.Callbacks  + PreCloudInitIso
    kubevirt.hooks.v1alpha3.Callbacks  + Shutdown       once, after QEMU; a plain container must end then

KubeVirt's Plugins (`pkg/hooks/plugins/v1alpha1/api.proto`) call another service, at the same moments:

    kubevirt.hooks.plugins.v1alpha1.DomainHookService   MutateDomain   domain and VMI in, domain out

KubeVirt calls only those callbacks that Info offers. PreCloudInitIso is not offered, because KubeVirt stops
at the first sidecar that answers it; it returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvplace.core.errors import GrpcStatus
from kvplace.core.protobuf import BadMessage, bytes_field, bytes_fields, read_bytes_fields

NAME = "kvplace"
VERSIONS = ("v1alpha1", "v1alpha2", "v1alpha3")
HOOK_POINTS = ("OnDefineDomain", "Shutdown")


class Reply(NamedTuple):
    """An answer that needs no child process."""

    message: bytes
    last: bool = False
    """Whether no call follows, so that a process that nothing else ends, ends when this has been sent."""


class DefineDomain(NamedTuple):
    """A domain to be pinned."""

    domain_xml: bytes
    vmi: bytes


class CallRefused(Exception):
    """A call that gets a gRPC status other than OK."""

    def __init__(self, status: GrpcStatus, sentence: str) -> None:
        self.status = status
        super().__init__(sentence)


def answer(path: str, message: bytes) -> Reply | DefineDomain:
    """Read one unary call; raises CallRefused."""
    method = _METHODS.get(path)
    if method is None:
        raise CallRefused(GrpcStatus.UNIMPLEMENTED, f"kvplace's hook has no method {path[:200]}")
    try:
        return method(read_bytes_fields(message))
    except BadMessage as error:
        raise CallRefused(GrpcStatus.INVALID_ARGUMENT, f"{path[:200]}: {error}") from None


def defined_domain(domain_xml: bytes) -> bytes:
    """Write the result of OnDefineDomain, and of MutateDomain."""
    return bytes_field(1, domain_xml)


def _info(_: dict[int, bytes]) -> Reply:
    points = [bytes_field(1, name) for name in HOOK_POINTS]
    return Reply(bytes_field(1, NAME) + bytes_fields(3, points) + bytes_fields(4, VERSIONS))


def _on_define_domain(fields: dict[int, bytes]) -> DefineDomain:
    return DefineDomain(domain_xml=fields.get(1, b""), vmi=fields.get(2, b""))


def _mutate_domain(fields: dict[int, bytes]) -> DefineDomain:
    return DefineDomain(domain_xml=fields.get(2, b""), vmi=fields.get(3, b""))


def _pre_cloud_init_iso(fields: dict[int, bytes]) -> Reply:
    return Reply(b"".join(bytes_field(number, fields[number]) for number in (1, 3) if number in fields))


def _shutdown(_: dict[int, bytes]) -> Reply:
    return Reply(b"", last=True)


_METHODS: dict[str, Callable[[dict[int, bytes]], Reply | DefineDomain]] = {
    "/kubevirt.hooks.info.Info/Info": _info,
    "/kubevirt.hooks.v1alpha1.Callbacks/OnDefineDomain": _on_define_domain,
    "/kubevirt.hooks.v1alpha2.Callbacks/OnDefineDomain": _on_define_domain,
    "/kubevirt.hooks.v1alpha2.Callbacks/PreCloudInitIso": _pre_cloud_init_iso,
    "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain": _on_define_domain,
    "/kubevirt.hooks.v1alpha3.Callbacks/PreCloudInitIso": _pre_cloud_init_iso,
    "/kubevirt.hooks.v1alpha3.Callbacks/Shutdown": _shutdown,
    "/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain": _mutate_domain,
}
