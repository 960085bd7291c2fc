"""Command line tools and demos for funzero."""

import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that a signal ended."""
