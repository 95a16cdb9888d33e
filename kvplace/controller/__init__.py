"""What happens without being asked: cores come free, lost claims come back, waiting VMs are woken.

Every piece of work is idempotent and guarded by the API server, so replicas may overlap; they divide the
nodes among themselves only to save work.
"""
