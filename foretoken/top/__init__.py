"""Turn readings of a gateway's metrics into a picture for a terminal: ``foretoken top``."""
