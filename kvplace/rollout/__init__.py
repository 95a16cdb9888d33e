"""Rollouts: hundreds of VMs from templates, planned first, made in waves, followed until they are pinned.

    async with open_rollouts() as rollouts:
        prepared = await rollouts.prepare(read_rollout(document, rollouts.namespace))
        report = await rollouts.create(prepared)

The cluster is the only state: the VMs carry the rollout's label, and its document is a ConfigMap.
"""
