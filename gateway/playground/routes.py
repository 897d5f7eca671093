"""Serve the page and its files, which are part of the package and need nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Everything comes from this server, and no text becomes HTML or a program.
SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # A browser asks every time, and gets 304 until the next version.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page; ``etag`` is a digest of its bytes."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 for a browser that has it."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def read_assets() -> dict[str, Asset]:
    """Return the page's files by name."""
    assets = {}
    for file in files(__package__).joinpath("assets").iterdir():
        body = file.read_bytes()
        media_type = MEDIA_TYPES["." + file.name.rpartition(".")[2]]
        assets[file.name] = Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return assets


def playground_router() -> APIRouter:
    """Return the routes of the page, which anybody may read: only what it calls needs a key."""
    router = APIRouter(include_in_schema=False)
    assets = read_assets()

    @router.get("/")
    async def index(request: Request) -> Response:
        """Return the page."""
        return assets[INDEX].answer(request)

    @router.get("/playground/{name}")
    async def asset(request: Request, name: str) -> Response:
        """Return a file of the page."""
        if name not in assets:
            raise HTTPException(404, "the page has no such file")
        return assets[name].answer(request)

    return router
