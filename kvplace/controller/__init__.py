"""The controller: releases and restores claims, and makes kube-scheduler retry waiting pods.

All work is idempotent and checked by the API server, so replicas may do the same at once; they start it at
different moments only to save work.
"""
