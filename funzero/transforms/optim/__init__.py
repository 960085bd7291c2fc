"""Optimizers, one algorithm per file."""
