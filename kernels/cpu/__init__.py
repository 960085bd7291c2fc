"""The kernels in C++ for CPUs: bit for bit what `reference` computes."""
