"""However the certificate of `serve` is made, it names each Service that leads to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cryptography import x509

from kvplace.certificates.keeper import server_of
from tests.manifests.objects import NAMESPACE

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"


@pytest.fixture(scope="module")
def services() -> set[str]:
    """Name the Services of the installation, as clients call them."""
    objects = list(yaml.safe_load_all((MANIFESTS / "serve" / "services.yaml").read_text()))
    return {f"{one['metadata']['name']}.{one['metadata']['namespace']}.svc" for one in objects}


def test_kvplaces_own_certificate_does(services: set[str]) -> None:
    assert set(server_of(NAMESPACE).dns_names) == services


def test_the_one_that_cert_manager_makes_does(services: set[str]) -> None:
    certificates = yaml.safe_load_all((MANIFESTS / "cert-manager" / "certificates.yaml").read_text())
    (names,) = (one["spec"]["dnsNames"] for one in certificates if "dnsNames" in one["spec"])
    assert set(names) == services


def test_the_one_that_the_script_makes_does(services: set[str], manifests: Path) -> None:
    file = manifests / "own-certificates" / "certificates" / "serve" / "tls.crt"
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(found.get_values_for_type(x509.DNSName)) == services
