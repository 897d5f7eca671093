"""Run verifiers in a Ray cluster: for ``foretoken serve --executor ray``,
or as the Ray Serve application ``app``.
"""

from foretoken.ray.application import app

__all__ = ["app"]
