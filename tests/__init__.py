"""Tests of kvplace; each folder holds those of one part, `control_plane` the cluster they share."""
