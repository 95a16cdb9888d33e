"""When and how often room is made: every pause and limit of evictions, moves and migrations.

Limits on the effort of one search are beside the search, in `core`. The rest of a VM after a move or a
migration also holds for commands: `nodes/node_cache.py`, `kube/migrations.py`.
"""

from __future__ import annotations

# Evictions.

VICTIM_NODES = 500
"""Nodes that one preempt call checks: first the nodes in kube-scheduler's call."""
VICTIM_SEARCH_S = 4.0
"""The longest search of one preempt call; kube-scheduler waits meanwhile, and gives up after httpTimeout."""
VICTIM_SEARCHES = 3
"""The most searches of one preempt call: a node may change before its cores are reserved."""
EQUAL_NODES = 16
"""The most nodes with equally cheap victims that are compared by placement."""
LEAVING_S = 120.0
"""The longest wait of a pod for another one that ends anyway, before others are evicted for it."""
REFUSED_S = 2.0
"""The greatest age of a refusal: kube-scheduler asks Filter and preempt in one attempt."""

# Moves and migrations.

AT_ONCE = 4
"""The most VMs that one replica makes room for at a time, with one move each, on different nodes."""
PAUSE_S = 60.0
"""The pause of making room for a VM after its end, or after a search without success."""
REST = 4
"""The pause after a search for moves, in multiples of its duration."""
DECIDED_S = 4.0
"""The longest wait of a preempt call for a search; kube-scheduler gives up after 10 s."""
RENEW_S = 10.0
"""A reservation is renewed this often while room is being made."""

# Moves inside a node.

MOVES_S = 300.0
"""The longest time of all moves for one VM; then they are given up."""
BOUND_AFTER_MOVES_S = 30.0
"""The longest time from the last move to the bind of the waiting VM."""

# Migrations.

TRY_S = 10.0
"""The time between searches for pods that wait because every node has too few CPUs."""
SEARCH_S = 60.0
"""The least time between two reads of all VMIs."""
SOON_S = 10.0
"""The pause before the next search, if a VM will likely be able to migrate in a moment."""
STARTING_S = 300.0
"""Older pods have not just started."""
MOST_REFUSED = 16
"""The most targets that kube-scheduler would refuse; each is left out of the next search."""
MOST_PER_HOUR = 6
EVACUATION_S = 600.0
"""The longest time between the migrations of one evacuation."""
POLL_S = 5.0
"""The time between two reads of a migration."""
UNANSWERED_S = 30.0
"""The longest time until a migration appears that was created without an answer."""
BOUND_AFTER_MIGRATION_S = 60.0
"""The longest time from the migration to the bind of the waiting VM."""
