"""Implement the command line's commands, except for the services."""
