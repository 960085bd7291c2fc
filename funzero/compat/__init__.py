"""What other libraries wrote, read as funzero's own."""
