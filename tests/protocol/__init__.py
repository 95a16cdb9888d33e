"""The protocol of claims, binds, releases and relocations as a deterministic simulation.

Real components of `serve` run on the cluster in memory, in virtual time. A seed decides everything else: when
calls and watch events arrive, which of them fail, who is killed, and what users, kubelets and agents do.
"""
