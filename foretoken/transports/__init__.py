"""Transports between a verifier and a drafter: requests, trees, and memory that both map."""
