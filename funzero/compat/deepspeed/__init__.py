"""DeepSpeed's settings, with its numbers."""
