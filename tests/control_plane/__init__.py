"""Tests against the real control plane that `harness.control_plane` starts, and of the harness itself."""
