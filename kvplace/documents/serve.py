"""The settings file of `kvplace serve`: its flags in YAML or JSON, for instance from a ConfigMap."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from kvplace.core.cluster.node_choice import Strategy
from kvplace.documents.model import DocumentModel, Text

SERVE_EXAMPLE = """\
# Settings for `kvplace serve --config FILE`; each is a flag of the same name; the command line wins.
tlsCert: /certs/tls.crt
tlsKey: /certs/tls.key
clientCa: /certs/ca.crt
sidecarImage: registry.example/kvplace/hook:1.0
clientNames: [kvplace-scheduler]
strategy: pack               # or spread, balance
mode: decide                 # or advise: leave the choice of the node to kube-scheduler
makeRoom: "off"              # or on-request, automatic, nodes: movable VMs make room for others
otherSchedulers: [batch-scheduler]
logLevel: info
"""
_AddressText = Annotated[Text, Field(pattern=r":\d+$", examples=[":8443"])]


def _off(value: object) -> object:
    """Read the word off, which YAML takes for false."""
    return "off" if value is False else value


class ServeDocument(DocumentModel):
    """Settings of `kvplace serve`. Each key is a flag of the same name; the command line wins."""

    model_config = ConfigDict(use_enum_values=True)

    kubeconfig: Text | None = None
    """Default: the service account of the pod, else the user's kubeconfig."""
    tls_cert: Text | None = None
    """Certificate file of both TLS listeners; read again when it changes."""
    tls_key: Text | None = None
    client_ca: Text | None = None
    """CA file of the schedulers that may call the extender."""
    client_names: tuple[Text, ...] = ()
    """Names in the certificates of schedulers that may call: common name, DNS name or URI."""
    admission_client_ca: Text | None = None
    """CA file of the API server's client certificate; by default webhook calls need none."""
    admission_client_names: tuple[Text, ...] = ()
    """Names in that certificate; by default any."""
    admission_client_namespaces: tuple[Text, ...] = ()
    """Without such a CA, pods of other namespaces are refused; API servers may call through these."""
    sidecar_image: Text | None = None
    """Image of the hook sidecar of every VM."""
    sidecar: Literal["annotation", "plugin"] | None = None
    """How KubeVirt calls the hook of new VMs: by an annotation of the VMI, or through a Plugin."""
    scheduler_name: Text | None = None
    """Scheduler of VMs that name none."""
    other_schedulers: tuple[Text, ...] = ()
    """Further schedulers that call this extender."""
    kubevirt_controller: Text | None = None
    """The user that creates the pods of VMs; the pods of others are admitted more slowly."""
    strategy: Strategy | None = None
    """The order of nodes that hold a VM equally well."""
    mode: Literal["decide", "advise"] | None = None
    """Whether Filter answers with the best node only, or with all nodes that fit."""
    nominate_from_nodes: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Nodes that a cluster must have for nodes to be nominated; 0: never."""
    make_room: Annotated[Literal["off", "on-request", "automatic", "nodes"], BeforeValidator(_off)] | None = (
        None
    )
    """Whether running VMs that may move make room for VMs that fit nowhere."""
    extender_address: _AddressText | None = None
    admission_address: _AddressText | None = None
    health_address: _AddressText | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None

    def given(self) -> dict[str, Any]:
        """Return the settings that the file has, by the names of the command's arguments."""
        return self.model_dump(exclude_unset=True)
