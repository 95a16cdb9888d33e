"""Forgetting pods that were deleted before kube-scheduler asked about them.

What is remembered about a pod is forgotten when the watch shows its end. If the end was seen before the
question, nothing would; so whoever adds a pod has a look at the two that nobody has looked at for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from itertools import islice
from typing import Any

from kvplace.core.scalars import PodUid

_NEWEST = 256
"""Pods that are not looked at: the watch may not have shown them yet."""
_AT_ONCE = 2


def forget_gone(remembered: OrderedDict[PodUid, Any], known: Container[PodUid]) -> None:
    """Forget those of the oldest entries whose pods are not known; the others are looked at again later."""
    if len(remembered) > _NEWEST:
        for uid in list(islice(remembered, _AT_ONCE)):
            if uid in known:
                remembered.move_to_end(uid)
            else:
                del remembered[uid]
