"""The end of certificates, compared with an independent reader of X.509."""

from __future__ import annotations

from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from harness.certificates import Certificates
from kvplace.service.listening import certificate_end


def test_the_end_is_that_of_the_certificate_that_ends_first(certificates: Certificates) -> None:
    leaf, authority = certificates.serve[0].read_bytes(), certificates.ours.file.read_bytes()
    expected = [x509.load_pem_x509_certificate(one).not_valid_after_utc for one in (leaf, authority)]
    assert [certificate_end(leaf), certificate_end(authority)] == expected
    assert certificate_end(leaf + authority) == min(expected)


@given(st.binary())
def test_bytes_that_are_not_a_certificate_have_no_end(junk: bytes) -> None:
    assert certificate_end(junk) is None
    framed = b"-----BEGIN CERTIFICATE-----" + junk + b"-----END CERTIFICATE-----"
    assert certificate_end(framed) is None


@given(st.data())
def test_a_certificate_that_is_cut_off_or_disturbed_does_no_harm(data: st.DataObject) -> None:
    import base64

    der = data.draw(st.binary(min_size=1, max_size=400))
    certificate_end(
        b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der) + b"\n-----END CERTIFICATE-----\n"
    )
