"""What takes several ranks."""
