"""Certificates are made, renewed in time, fixed, and otherwise left alone."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from kvplace.certificates.authority import AUTHORITY, CERTIFICATE, KEY, Pair
from kvplace.certificates.keeper import CA_SECRET, CLIENT_SECRET, SERVER_SECRET, Keeper
from kvplace.core.errors import Conflict
from kvplace.kube.secrets import Secret
from kvplace.service.process import Readiness
from tests.certificates.stored_secrets import StoredSecrets

ALL = [CA_SECRET, SERVER_SECRET, CLIENT_SECRET]
NOW = datetime.now(UTC)
NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


NAMES = ("kvplace-system", "kvplace-certificates", "kvplace-scheduler")
"""The namespaces, and the scheduler that may call."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> StoredSecrets:
    return StoredSecrets()


@pytest.fixture
def keeper(store: StoredSecrets, clock: Clock) -> Keeper:
    return Keeper(store, *NAMES, Readiness("not yet"), now=clock)


def handshake(
    store: StoredSecrets, folder: Path, *, client_trusts: bytes | None = None, at: datetime | None = None
) -> str:
    """Connect as kube-scheduler to serve with what the Secrets hold; returns the client's name there.

    OpenSSL knows no time but now; at another one the times are checked here.
    """
    trusted = client_trusts or store.content(CLIENT_SECRET)[AUTHORITY]
    if at is not None:
        by_server = store.content(SERVER_SECRET)[AUTHORITY]
        for name, trusts in ((SERVER_SECRET, trusted), (CLIENT_SECRET, by_server)):
            assert is_valid(store.content(name)[CERTIFICATE], trusts, at)
    for name in ALL:
        for key, value in store.content(name).items():
            (folder / f"{name}.{key}").write_bytes(value)
    (folder / "trusted").write_bytes(trusted)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / f"{SERVER_SECRET}.{CERTIFICATE}", folder / f"{SERVER_SECRET}.{KEY}")
    server.load_verify_locations(folder / f"{SERVER_SECRET}.{AUTHORITY}")
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=str(folder / "trusted"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    client.load_cert_chain(folder / f"{CLIENT_SECRET}.{CERTIFICATE}", folder / f"{CLIENT_SECRET}.{KEY}")
    if at is not None:
        for context in (server, client):
            context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="kvplace-extender.kvplace-system.svc")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (ours, theirs):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    peer = theirs.getpeercert()
    assert peer is not None
    return str(peer["subject"])


def is_valid(leaf: bytes, trusted: bytes, at: datetime) -> bool:
    """Whether a certificate and one of its signers are valid at a time."""
    found = x509.load_pem_x509_certificate(leaf)

    def signed(authority: x509.Certificate) -> bool:
        try:
            found.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):
            return False
        return True

    chain = [found, *filter(signed, x509.load_pem_x509_certificates(trusted))]
    return len(chain) > 1 and all(one.not_valid_before_utc <= at < one.not_valid_after_utc for one in chain)


async def test_missing_certificates_are_made_and_the_scheduler_and_serve_trust_each_other(
    keeper: Keeper, store: StoredSecrets, tmp_path: Path
) -> None:
    await keeper.check()
    assert store.writes == ALL
    assert "kvplace-scheduler" in handshake(store, tmp_path)
    assert store.trusted == store.content(CA_SECRET)[CERTIFICATE] == store.content(CA_SECRET)[AUTHORITY]
    served = x509.load_pem_x509_certificate(store.content(SERVER_SECRET)[CERTIFICATE])
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "kvplace.kvplace-system.svc",
        "kvplace-extender.kvplace-system.svc",
    ]


async def test_valid_certificates_are_left_alone(keeper: Keeper, store: StoredSecrets, clock: Clock) -> None:
    await keeper.check()
    store.writes.clear()
    clock.now += timedelta(days=59)
    await keeper.check()
    assert store.writes == []


async def test_certificates_are_renewed_when_a_third_of_their_time_is_left(
    keeper: Keeper, store: StoredSecrets, clock: Clock
) -> None:
    await keeper.check()
    before = store.content(SERVER_SECRET)
    store.writes.clear()
    clock.now += timedelta(days=61)
    await keeper.check()
    assert store.writes == [SERVER_SECRET, CLIENT_SECRET]
    assert store.content(SERVER_SECRET)[KEY] != before[KEY]
    assert store.content(SERVER_SECRET)[AUTHORITY] == before[AUTHORITY]


YEARS = timedelta(days=365)


async def test_a_ca_is_followed_by_one_with_another_key_and_nothing_is_refused_on_the_way(
    keeper: Keeper, store: StoredSecrets, clock: Clock, tmp_path: Path
) -> None:
    """A scheduler reads the CA at its start only; here it is restarted every 500 days."""
    clock.now = NOW - 12 * YEARS
    await keeper.check()
    first, trusted, signers = store.content(CA_SECRET)[KEY], b"", set()
    while clock.now < NOW + 12 * YEARS:
        if (NOW - clock.now).days % 500 == 0 or not trusted:
            trusted = store.content(CLIENT_SECRET)[AUTHORITY]
        clock.now += timedelta(days=20)
        await keeper.check()
        assert store.content(SERVER_SECRET)[AUTHORITY] == store.trusted
        signer = x509.load_pem_x509_certificate(store.content(CA_SECRET)[CERTIFICATE])
        signers.add(signer.serial_number)
        handshake(store, tmp_path, client_trusts=trusted, at=clock.now)
        assert signer.not_valid_after_utc - clock.now > timedelta(days=365)
    assert len(signers) >= 3
    assert store.content(CA_SECRET)[KEY] != first


async def test_a_ca_is_published_long_before_it_signs_and_its_predecessor_until_it_ends(
    keeper: Keeper, store: StoredSecrets, clock: Clock
) -> None:
    begun = clock.now
    await keeper.check()
    old = store.content(CA_SECRET)[CERTIFICATE]
    clock.now = begun + timedelta(days=2440)
    await keeper.check()
    assert store.content(CA_SECRET)[CERTIFICATE] == old
    assert store.trusted.startswith(old)
    successor = store.trusted.removeprefix(old)
    clock.now = begun + timedelta(days=3000)
    await keeper.check()
    assert store.content(CA_SECRET)[CERTIFICATE] == old
    clock.now = begun + timedelta(days=3100)
    await keeper.check()
    assert store.content(CA_SECRET)[CERTIFICATE] == successor
    assert store.trusted == successor + old
    clock.now = begun + timedelta(days=3651)
    await keeper.check()
    assert store.trusted == successor


async def test_a_damaged_ca_is_followed_by_the_successor_that_others_trust_already(
    keeper: Keeper, store: StoredSecrets, clock: Clock
) -> None:
    await keeper.check()
    old = store.content(CA_SECRET)[CERTIFICATE]
    clock.now += timedelta(days=2600)
    await keeper.check()
    successor = store.trusted.removeprefix(old)
    store.put(CA_SECRET, {**store.content(CA_SECRET), KEY: b"no key"})
    await keeper.check()
    assert store.trusted == store.content(CA_SECRET)[CERTIFICATE] == successor


async def test_the_ca_of_another_program_is_used_and_followed_by_ours(
    keeper: Keeper, store: StoredSecrets, clock: Clock, tmp_path: Path
) -> None:
    store.put(CA_SECRET, authority_of_another_program(begins=NOW - timedelta(days=200), lasts_days=300))
    clock.now = NOW - timedelta(days=10)
    await keeper.check()
    signed = store.content(CLIENT_SECRET)[CERTIFICATE]
    clock.now = NOW + timedelta(days=10)
    await keeper.check()
    assert store.content(CLIENT_SECRET)[CERTIFICATE] == signed
    trusted = store.trusted
    clock.now = NOW + timedelta(days=60)
    await keeper.check()
    assert store.content(CLIENT_SECRET)[CERTIFICATE] != signed
    handshake(store, tmp_path, client_trusts=trusted, at=clock.now)


def authority_of_another_program(begins: datetime, lasts_days: int) -> dict[str, bytes]:
    """Make a CA that names its key by another digest, as programs in Go do since 1.25."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a CA")])
    usage = dict.fromkeys(
        (
            *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
            *("key_agreement", "encipher_only", "decipher_only"),
        ),
        False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=lasts_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier(b"another digest......"), critical=False)
        .sign(key, SHA256())
    )
    return Pair(certificate, key).document(b"")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({}, id="empty"),
        pytest.param({CERTIFICATE: b"\xff", KEY: b"no key"}, id="no certificate"),
        pytest.param({KEY: b"no key"}, id="no key"),
    ],
)
async def test_a_damaged_secret_is_fixed(
    keeper: Keeper, store: StoredSecrets, tmp_path: Path, name: str, damage: dict[str, bytes]
) -> None:
    await keeper.check()
    store.put(name, {**store.content(name), **damage} if damage else {})
    await keeper.check()
    handshake(store, tmp_path)


P256 = bytes.fromhex("06082a8648ce3d030107")
"""The curve of our keys, as certificates name it."""
OF_EXTENSIONS = bytes.fromhex("0603551d")
"""How the name of each extension begins."""


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("part", "damaged"),
    [
        pytest.param(P256, P256[:-1] + b"\x7f", id="a curve that is none"),
        pytest.param(P256 + b"\x03\x42\x00\x04", P256 + b"\x03\x42\x00\x09", id="a point that is none"),
        pytest.param(OF_EXTENSIONS, bytes.fromhex("0203551d"), id="an extension without a name"),
    ],
)
async def test_a_certificate_of_which_a_byte_is_wrong_is_replaced(
    keeper: Keeper, store: StoredSecrets, tmp_path: Path, name: str, part: bytes, damaged: bytes
) -> None:
    await keeper.check()
    whole = ssl.PEM_cert_to_DER_cert(store.content(name)[CERTIFICATE].decode())
    assert part in whole
    wrong = ssl.DER_cert_to_PEM_cert(whole.replace(part, damaged, 1)).encode()
    store.put(name, {**store.content(name), CERTIFICATE: wrong})
    await keeper.check()
    handshake(store, tmp_path)


async def test_a_certificate_for_something_else_is_replaced(
    keeper: Keeper, store: StoredSecrets, tmp_path: Path
) -> None:
    await keeper.check()
    store.put(SERVER_SECRET, store.content(CLIENT_SECRET))
    await keeper.check()
    handshake(store, tmp_path)


async def test_a_deleted_secret_comes_back_with_the_same_ca(keeper: Keeper, store: StoredSecrets) -> None:
    await keeper.check()
    authority = store.trusted
    del store.secrets[f"kvplace-system/{CLIENT_SECRET}"]
    await keeper.check()
    assert store.content(CLIENT_SECRET)[AUTHORITY] == store.trusted == authority


async def test_of_two_keepers_the_slower_one_starts_again(
    keeper: Keeper, store: StoredSecrets, clock: Clock
) -> None:
    other = Keeper(store, *NAMES, Readiness(""), now=clock)

    class Interrupted(StoredSecrets):
        async def read_secret(self, namespace: str, name: str) -> Secret | None:
            found = await store.read_secret(namespace, name)
            await other.check()
            return found

        write_secret = store.write_secret

    slower = Keeper(Interrupted(), *NAMES, Readiness(""), now=clock)
    with pytest.raises(Conflict):
        await slower.check()
    assert store.writes == ALL


async def test_webhooks_that_are_applied_later_are_waited_for(keeper: Keeper, store: StoredSecrets) -> None:
    store.has_webhooks = False
    assert await keeper.check() == "no webhook is there yet"
    store.has_webhooks = True
    assert await keeper.check() == "only just told"
    assert await keeper.check() == ""
    assert store.trusted == store.content(CA_SECRET)[CERTIFICATE]
