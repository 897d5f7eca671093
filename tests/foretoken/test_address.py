"""Bad addresses are refused where they are given, with the reason."""

from __future__ import annotations

import pytest

from foretoken.address import check_address


@pytest.mark.parametrize(
    "address", ["unix:/run/v.sock", "127.0.0.1:1", "localhost:65535", "[::1]:50051", "dns:///verifier:50051"]
)
def test_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", "expected unix:/path or host:port"),
        ("/tmp/v.sock", "expected unix:/path or host:port"),
        ("http://127.0.0.1:19200", "expected unix:/path or host:port"),
        (":19200", "expected unix:/path or host:port"),
        ("", "expected unix:/path or host:port"),
        ("unix:", "expected an absolute path after unix:"),
        ("unix:v.sock", "expected an absolute path after unix:"),
        ("127.0.0.1:99999", "expected a port from 1 to 65535 after the last colon"),
        ("127.0.0.1:0", "expected a port from 1 to 65535 after the last colon"),
        ("127.0.0.1:port", "expected a port from 1 to 65535 after the last colon"),
        ("localhost:", "expected a port from 1 to 65535 after the last colon"),
    ],
)
def test_what_is_none(address: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_address(address)
