"""Faults that users of such systems met: a test for each case, named after its id."""
