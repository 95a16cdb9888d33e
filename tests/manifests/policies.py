"""Wait for an admission policy or a right that has just been applied or removed.

The API server takes policies and roles into use some moments after it has stored them, and does not report
this.
"""

from __future__ import annotations

from collections.abc import Callable

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from harness.control_plane.cluster import Json, RequestRefused
from harness.waiting import PATIENCE_S


class NotInForce(Exception):
    """A request went through that a policy is to refuse."""


@retry(
    retry=retry_if_exception_type(NotInForce),
    wait=wait_fixed(0.1),
    stop=stop_after_delay(PATIENCE_S),
    reraise=True,
)
def refused(request: Callable[[], Json]) -> RequestRefused:
    """Return how a harmless request (a dry run) is refused, once the policy that does so is in effect."""
    try:
        request()
    except RequestRefused as error:
        return error
    raise NotInForce


@retry(
    retry=retry_if_exception_type(RequestRefused),
    wait=wait_fixed(0.1),
    stop=stop_after_delay(PATIENCE_S),
    reraise=True,
)
def granted(request: Callable[[], Json]) -> Json:
    """Repeat a request until the API server allows it, and return the answer."""
    return request()
