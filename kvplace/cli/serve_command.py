"""`kvplace serve`: the extender, admission and the controller; `kvplace certificates`: their certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvplace.cli.parameters import (
    InputFile,
    Words,
    address_option,
    example_option,
    process_options,
    strategy_option,
)
from kvplace.core.well_known_names import FrontEnd

if TYPE_CHECKING:
    from kvplace.core.cluster.node_choice import Strategy

_FILE = click.Path(path_type=Path, dir_okay=False)  # read again when they change, so never stdin


def _read_config(context: click.Context, _option: click.Parameter, path: str | None) -> None:
    """Make the settings of a file the defaults of the flags."""
    if path is None:
        return
    from kvplace.documents.model import read_model
    from kvplace.documents.reading import load_document, source_name
    from kvplace.documents.serve import ServeDocument

    context.default_map = read_model(ServeDocument, load_document(Path(path)), source_name(path)).given()


@click.command("serve", short_help="Run the extender, admission and controller.")
@click.option(
    "--config",
    type=InputFile(),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="Settings in YAML or JSON (see `kvplace schema serve`); a flag on the command line wins.",
)
@example_option("serve")
@click.option(
    "--tls-cert",
    type=_FILE,
    required=True,
    help="Certificate of both TLS listeners; re-read when it changes.",
)
@click.option("--tls-key", type=_FILE, required=True, help="Its key.")
@click.option(
    "--client-ca", type=_FILE, required=True, help="CA of the schedulers that may call the extender."
)
@click.option(
    "--client-name",
    "client_names",
    multiple=True,
    default=("kvplace-scheduler",),
    show_default=True,
    metavar="NAME",
    help="Name in a scheduler's certificate that may call; may be given several times.",
)
@click.option(
    "--admission-client-ca",
    type=_FILE,
    help="CA of the API server's client certificate; by default webhook calls need none.",
)
@click.option(
    "--admission-client-name",
    "admission_client_names",
    multiple=True,
    metavar="NAME",
    help="Name in that certificate; may be given several times.",
)
@click.option(
    "--admission-client-namespace",
    "admission_client_namespaces",
    multiple=True,
    default=("kube-system",),
    show_default=True,
    metavar="NAMESPACE",
    help="Without such a CA, pods may call the webhooks in this namespace only; may be given several times.",
)
@click.option(
    "--sidecar-image", required=True, metavar="IMAGE", help="Image of the hook sidecar of every VM."
)
@click.option(
    "--sidecar",
    type=Words(["annotation", "plugin"]),
    default="annotation",
    show_default=True,
    help="How KubeVirt calls the hook of new VMs: as a sidecar that an annotation of the VMI names, or "
    "through a Plugin.",
)
@click.option(
    "--scheduler-name",
    default="kvplace-scheduler",
    show_default=True,
    help="Scheduler of VMs that name none.",
)
@click.option(
    "--other-scheduler",
    "other_schedulers",
    multiple=True,
    metavar="NAME",
    help="A further scheduler that calls this extender; may be given several times.",
)
@click.option(
    "--kubevirt-controller",
    default="system:serviceaccount:kubevirt:kubevirt-controller",
    show_default=True,
    metavar="USER",
    help="The user that creates the pods of VMs.",
)
@strategy_option("Order of nodes with equally good placements.")
@click.option(
    "--mode",
    type=Words(["decide", "advise"]),
    default="decide",
    show_default=True,
    help="Whether filter answers with the best node only, or with all nodes that fit.",
)
@click.option(
    "--nominate-from-nodes",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="NUMBER",
    help="With at least so many nodes, waiting pods are planned together and get nominated nodes; 0: never.",
)
@click.option(
    "--make-room",
    type=Words(["off", "on-request", "automatic", "nodes"]),
    default="off",
    show_default=True,
    help="Whether running VMs with kvplace.io/movable get other cores of their node so that a waiting "
    "VM fits; on-request: for VMs with kvplace.io/make-room; nodes: one VM may also go to another node.",
)
@address_option("--extender-address", ":8443")
@address_option("--admission-address", ":9443")
@process_options(health_address=":8081")
def command(
    *,
    tls_cert: Path,
    tls_key: Path,
    client_ca: Path,
    client_names: tuple[str, ...],
    sidecar_image: str,
    sidecar: str,
    scheduler_name: str,
    other_schedulers: tuple[str, ...],
    kubevirt_controller: str,
    strategy: Strategy,
    mode: str,
    nominate_from_nodes: int,
    make_room: str,
    **settings: Any,
) -> None:
    """Serve kube-scheduler's extender calls and admission webhooks, and release the cores of ended pods.

    Runs until SIGTERM. Any number of replicas may run side by side.
    """
    from kvplace.admission.objects import AdmissionSettings
    from kvplace.scheduler.extender import ExtenderSettings, Mode
    from kvplace.scheduler.room_maker import MakeRoom
    from kvplace.serve.process import ServeSettings, run
    from kvplace.service.listening import TlsFiles

    run(
        ServeSettings(
            tls=TlsFiles(tls_cert, tls_key, client_ca, client_names),
            admission=AdmissionSettings(
                sidecar_image=sidecar_image,
                front_end=FrontEnd(sidecar),
                scheduler_name=scheduler_name,
                other_schedulers=other_schedulers,
                kubevirt_controller=kubevirt_controller,
            ),
            extender=ExtenderSettings(
                strategy=strategy,
                mode=Mode(mode),
                nominate_from_nodes=nominate_from_nodes,
                make_room=MakeRoom(make_room),
            ),
            **settings,
        )
    )


@click.command("certificates", short_help="Keep the certificates of an installation.")
@click.option(
    "--namespace",
    default="kvplace-system",
    show_default=True,
    help="Namespace of the two Secrets, and of the Services that the server certificate is for.",
)
@click.option(
    "--own-namespace",
    default="kvplace-certificates",
    show_default=True,
    help="Namespace of the Secret with the CA and its key.",
)
@click.option(
    "--client-name",
    default="kvplace-scheduler",
    show_default=True,
    metavar="NAME",
    help="Name in the scheduler's certificate; `kvplace serve --client-name` must allow it.",
)
@process_options(health_address=":8081")
def certificates(**settings: Any) -> None:
    """Make a CA, a server certificate for `kvplace serve` and a client certificate for its scheduler.

    They are kept in Secrets and renewed when a third of their time is left; the API server is configured to
    trust the webhooks by this CA. Runs until SIGTERM.
    """
    from kvplace.certificates.keeper import CertificatesSettings, run

    run(CertificatesSettings(**settings))
