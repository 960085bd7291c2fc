"""Kernels without funzero: each defined in plain torch by `reference`, with faster backends beside it.

`ops` is the way in: `update`, `square_sum` and `accumulate`. Importing it builds nothing and reads no environment
variable; a backend is made when it is first used.
"""
