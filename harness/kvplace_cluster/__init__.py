"""kvplace installed from its manifests on the control plane, for tests, benchmarks and `./make cluster`."""
