"""The objects that operators apply: accepted by a real API server, no right too many, no right too few."""
