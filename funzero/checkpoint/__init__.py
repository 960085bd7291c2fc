"""The state tree on disk."""
