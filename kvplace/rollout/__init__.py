"""Rollouts: hundreds of VMs from templates, planned first, made in waves, followed until they are pinned.

    async with open_rollouts() as rollouts:
        prepared = await rollouts.prepare(read_rollout(document, rollouts.namespace))
        report = await rollouts.create(prepared)

The cluster is the only state: the VMs carry the rollout's label, and its document is a ConfigMap.
"""

from kvplace.rollout.forecast import Forecast
from kvplace.rollout.report import Counts, Failure, Report
from kvplace.rollout.rollouts import Prepared, Rollouts, open_rollouts
from kvplace.rollout.run import RolloutRun
from kvplace.rollout.templates import Rollout, WantedVm, read_rollout

__all__ = [
    "Counts",
    "Failure",
    "Forecast",
    "Prepared",
    "Report",
    "Rollout",
    "RolloutRun",
    "Rollouts",
    "WantedVm",
    "open_rollouts",
    "read_rollout",
]
