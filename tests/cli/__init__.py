"""Tests of funzero.cli."""
