"""`kvplace certificates`: makes and renews the certificates of an installation."""

from __future__ import annotations

from pathlib import Path

import click

from kvplace.cli.parameters import process_options


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
def command(
    namespace: str,
    client_name: str,
    own_namespace: str,
    kubeconfig: Path | None,
    health_address: str,
    log_level: str,
) -> None:
    """Make a CA, a server certificate for `kvplace serve` and a client certificate for its scheduler.

    They are kept in Secrets and renewed when a third of their time is left; the API server is configured to
    trust the webhooks by this CA. Runs until SIGTERM.
    """
    from kvplace.certificates.keeper import CertificatesSettings, run
    from kvplace.service.connections import Address

    run(
        CertificatesSettings(
            namespace=namespace,
            own_namespace=own_namespace,
            client_name=client_name,
            health_address=Address.parse(health_address),
            kubeconfig=kubeconfig,
            log_level=log_level,
        )
    )
