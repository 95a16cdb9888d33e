"""The CPUs and memory of one VM on one machine: `allocate.place`, and its parts."""
