"""Numbered scripts, each a complete small training run."""
