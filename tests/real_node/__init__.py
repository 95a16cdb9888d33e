"""The whole way on real nodes."""
