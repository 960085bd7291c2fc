"""Kernels without funzero: each defined in plain torch, with faster backends beside it."""
