"""The CPU kernels: compiled by numba, one order of arithmetic for every row whatever batch it runs in."""
