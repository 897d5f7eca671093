"""Hold the router's defaults apart from it, so that settings load no NumPy."""

DEFAULT_LOAD_BOUND = 1.25
