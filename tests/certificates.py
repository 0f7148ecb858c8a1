"""Certificates for the TLS tests: an authority of our own, and a server that it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY, SERVER = "llmprofile test authority", "localhost"
PEM = serialization.Encoding.PEM


class TlsFiles(NamedTuple):
    """The authority's certificate, and the certificate and key of 127.0.0.1, ::1 and localhost."""

    ca_file: Path
    certfile: Path
    keyfile: Path


def make_tls_files(folder: Path) -> TlsFiles:
    """Write an authority's certificate, a server's certificate and its key."""
    files = TlsFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    files.ca_file.write_bytes(certificate(AUTHORITY, authority, authority, authority_extensions()))
    files.certfile.write_bytes(certificate(SERVER, server, authority, server_extensions()))
    form, open_key = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.keyfile.write_bytes(server.private_bytes(PEM, form, open_key))
    return files


def authority_extensions() -> list[x509.ExtensionType]:
    """Say that this one may sign others."""
    uses = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return [
        x509.BasicConstraints(ca=True, path_length=0),
        x509.KeyUsage(key_cert_sign=True, crl_sign=True, **uses),
    ]


def server_extensions() -> list[x509.ExtensionType]:
    """Say whose name and addresses these are."""
    addresses = [x509.IPAddress(ipaddress.ip_address(a)) for a in ("127.0.0.1", "::1")]
    return [
        x509.BasicConstraints(ca=False, path_length=None),
        x509.SubjectAlternativeName([x509.DNSName(SERVER), *addresses]),
    ]


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    extensions: list[x509.ExtensionType],
) -> bytes:
    """Return a certificate of this name and key, valid from yesterday for three days, as PEM."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, AUTHORITY)]))
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    for extension in extensions:
        critical = not isinstance(extension, x509.SubjectAlternativeName)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority_key, hashes.SHA256()).public_bytes(PEM)
