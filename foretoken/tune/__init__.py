"""Find the settings with which a server makes the most tokens a second: ``foretoken tune``."""
