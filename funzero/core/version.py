"""The version of funzero."""

__version__ = "0.1.0"
