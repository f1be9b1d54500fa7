"""Which hosts are this machine, and what is sent to the others in plain text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quota.common.hosts import is_loopback, is_readable_on_the_way


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        *((host, True) for host in ("127.0.0.1", "LOCALHOST", "localhost.", "::1", "::ffff:127.0.0.1")),
        ("0.0.0.0", False),  # noqa: S104
        ("", False),
        ("10.0.0.1", False),
        ("127.999.0.1", False),  # a name, whatever it resolves to
        ("::ffff:10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_this_machine_reaches_loopback(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here


@pytest.mark.parametrize(
    ("url", "readable"),
    [
        ("https://api.example.com", False),
        ("http://api.example.com", True),
        ("http://127.0.0.1:8765", False),
        ("http://[::1]:8765/", False),
        ("http://0.0.0.0:8765", True),
        ("http://localhost@api.example.com", True),
    ],
)
def test_traffic_to_another_machine_without_tls_is_readable(url: str, readable: bool) -> None:
    assert is_readable_on_the_way(url) is readable


def test_reading_the_configuration_imports_no_sockets() -> None:
    """Each cold command would pay for them."""
    code = (
        "import sys, quota.settings.load\nassert not {'socket', 'unicodedata'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
