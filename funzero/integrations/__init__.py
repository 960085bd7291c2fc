"""Bridges from and to things that users already have, such as torch modules."""
