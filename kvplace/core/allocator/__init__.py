"""Which CPUs and memory one VM gets on one machine: `allocate.place`, and what it is made of."""
