"""The cookie of a session: no other client can write one, and it ends in time."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.errors import Refused
from kvplace.kube.reviews import Person
from kvplace.web.sessions import LONGEST_S, Sessions, token_end

NOW = 1_800_000_000.0
ANNA = Person("anna", "u-1", ("operators", "system:authenticated"), {"scopes": ("a", "b")})


class Clock:
    """Time that a test sets."""

    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "tls.key"
    file.write_bytes(b"a private key")
    return file


@pytest.fixture
def clock() -> Clock:
    return Clock()


def token(claims: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{body}.c2ln"


def test_a_cookie_states_who_signed_in_to_every_replica_with_the_same_key(secret: Path, clock: Clock) -> None:
    session, cookie = Sessions(secret, clock).open(ANNA, "opaque")
    assert Sessions(secret, clock).read(cookie) == session
    assert session.person == ANNA


def test_a_session_ends_with_its_token_and_after_eight_hours_at_the_latest(
    secret: Path, clock: Clock
) -> None:
    sessions = Sessions(secret, clock)
    ends = [sessions.open(ANNA, token({"exp": NOW + lasts}))[0].ends - NOW for lasts in (600.0, 1e9)]
    assert ends == [600.0, LONGEST_S]
    _, cookie = sessions.open(ANNA, token({"exp": NOW + 600}))
    clock.now = NOW + 599
    assert sessions.read(cookie) is not None
    clock.now = NOW + 600
    assert sessions.read(cookie) is None


@pytest.mark.parametrize("claims", [{}, {"exp": "soon"}, {"exp": None}, [], "text", {"exp": float("nan")}])
def test_a_token_that_does_not_state_when_it_ends_makes_no_endless_session(
    secret: Path, clock: Clock, claims: object
) -> None:
    assert token_end(token(claims)) == float("inf")
    assert Sessions(secret, clock).open(ANNA, token(claims))[0].ends == NOW + LONGEST_S


def test_a_new_key_ends_all_sessions(secret: Path, clock: Clock) -> None:
    sessions = Sessions(secret, clock)
    _, cookie = sessions.open(ANNA, "opaque")
    secret.write_bytes(b"the key of a renewed certificate")
    clock.now += 60
    assert sessions.read(cookie) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: base64.b64encode(raw).decode()))
def test_what_we_did_not_write_is_nobodys(secret: Path, text: str) -> None:
    sessions = Sessions(secret)
    assert sessions.read(text) is None
    assert sessions.read(f"{text}.{text}") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cookie_with_one_other_character_is_nobodys(secret: Path, data: st.DataObject) -> None:
    sessions = Sessions(secret, lambda: NOW)
    _, cookie = sessions.open(ANNA, "opaque")
    # The last character of each part may carry bits that mean nothing.
    place = data.draw(st.integers(0, len(cookie) - 2).filter(lambda one: cookie[one + 1] != "."))
    other = data.draw(st.sampled_from("AZaz09-_.").filter(lambda one: one != cookie[place]))
    assert sessions.read(cookie[:place] + other + cookie[place + 1 :]) is None


def test_groups_that_no_cookie_can_hold_are_refused_with_a_way_out(secret: Path) -> None:
    many = Person("anna", groups=tuple(f"{number:x}-{number**5:x}" for number in range(1, 600)))
    with pytest.raises(Refused, match=r"599.*proxy"):
        Sessions(secret).open(many, "opaque")
