"""The shared core of foretoken: what two or more services must agree on."""

__version__ = "0.1.0"
