"""Certificates for servers and clients, signed by an authority of the tests' own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    import trustme


class Pair(NamedTuple):
    certificate: Path
    key: Path


class Certificates:
    """Files in a folder.

    ca            the authority
    stranger      another authority, which signed none of these
    server        for localhost and 127.0.0.1
    other_host    for other.example
    expired       for localhost, until yesterday
    client        for a client
    foreign       for a client, signed by the stranger
    """

    def __init__(self, folder: Path) -> None:
        import trustme  # not above: most test runs need none

        folder.mkdir(parents=True, exist_ok=True)
        authority, stranger = trustme.CA(), trustme.CA()
        self.folder = folder
        self.ca, self.stranger = folder / "ca.pem", folder / "stranger.pem"
        authority.cert_pem.write_to_path(self.ca)
        stranger.cert_pem.write_to_path(self.stranger)
        self.server = self._issue(authority, "server", "localhost", "127.0.0.1")
        self.other_host = self._issue(authority, "other_host", "other.example")
        yesterday = datetime.now(UTC) - timedelta(days=1)
        self.expired = self._issue(authority, "expired", "localhost", until=yesterday)
        self.client = self._issue(authority, "client", "client.example")
        self.foreign = self._issue(stranger, "foreign", "client.example")

    def _issue(self, authority: trustme.CA, name: str, *hosts: str, until: datetime | None = None) -> Pair:
        issued = authority.issue_cert(*hosts, not_after=until)
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(pair.certificate, append=number > 0)
        issued.private_key_pem.write_to_path(pair.key)
        pair.key.chmod(0o600)
        return pair

    def options(self, port: int, shown: Pair | None = None, *, wants_clients: bool = False) -> list[str]:
        """What a server is told: it shows `shown`, else `server`, at that port. Where it wants clients' certificates it
        refuses a connection without one."""
        certificate, key = shown or self.server
        options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        return [*options, "--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "yes" if wants_clients else "no"]


@cache
def private_key() -> str:
    """The key with which a service account signs."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*form).decode()
