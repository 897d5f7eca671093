"""Load an OpenAI-compatible server and measure it: ``foretoken bench``."""
