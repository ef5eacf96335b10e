"""Tests of IPv6 addresses run where the machine has any."""

from __future__ import annotations

import socket

import pytest


def _has_loopback_address() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_loopback_address(), reason="this machine has no IPv6 addresses")
"""The mark of such tests."""
