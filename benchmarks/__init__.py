"""Benchmarks of foretoken: the whole stack (run), and parts of it alone. Not part of the installed package."""
