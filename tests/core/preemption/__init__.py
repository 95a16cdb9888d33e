"""Tests of preemption's decisions."""
