"""CPU kernels, compiled by numba: each row's arithmetic has one order, whatever batch it is in."""
