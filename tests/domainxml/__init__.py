"""Tests of the domain rewriting."""
