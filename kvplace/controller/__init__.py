"""The controller: releases and restores claims, and makes kube-scheduler retry waiting pods.

All work is idempotent and checked by the API server, so replicas may do the same at once; they start it at
different moments only to save work.

    controller          takes the watches' events, and checks each node that is due
    cluster             one node at one moment: all decisions are made on this record
    reconciler          releases and restores the claims of the node, as claim_action decides
    relocator           gives running pods other cores: relocation_step decides the next step,
                        relocation_claims the change of the ledger that makes it
"""
