"""Benchmarks of foretoken: the whole stack (run), and its parts. The wheel does not carry them."""
