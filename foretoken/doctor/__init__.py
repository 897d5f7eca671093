"""Check this machine and a model's files.

Each check is a small function that gets the facts it judges.
"""
