"""The kernels of `reference` for CUDA and ROCm, in Triton. Importing this imports triton."""

from .launch import accumulate, square_sum, update

__all__ = ["accumulate", "square_sum", "update"]
