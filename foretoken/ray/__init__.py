"""Run verifiers in a Ray cluster.

``foretoken serve --executor ray`` does so, and the Ray Serve application ``app``.
"""

from foretoken.ray.application import app

__all__ = ["app"]
