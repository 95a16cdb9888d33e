"""The words that a request may hold, all of them."""

from __future__ import annotations

from kvplace.core.request import GuestNuma, Policy, Scope

SCOPES = tuple(Scope)
POLICIES = tuple(Policy)
GUEST_NUMAS = tuple(GuestNuma)
