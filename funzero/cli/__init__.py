"""Command line tools and demos for funzero."""
