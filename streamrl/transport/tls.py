"""TLS of the run's HTTP servers, with configured certificates, or with certificates made for the run.

A run's certificates are signed by an authority whose key is derived from the run's secret (P-256, X.509). So every
process with the secret can compute the authority, make itself a certificate, and reject servers without one. Host names
are not checked then: a server with such a certificate belongs to the run.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streamrl.config import SecurityConfig
from streamrl.errors import ConfigError
from streamrl.transport.secret import Secret

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the group of P-256 (FIPS 186-5): private keys are from 1 to this number minus 1."""
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "streamrl run")])
_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


class CertificateFiles(NamedTuple):
    """A server's certificate and its private key, in PEM."""

    certificate: str
    key: str


def client_context(secret: Secret | None, security: SecurityConfig) -> ssl.SSLContext:
    """Return the TLS context by which a client verifies the run's servers: with the run's own authority, or with the
    one of `security.tls_dir`, which also checks host names. Raises `ConfigError` if that cannot be read."""
    if security.tls_dir:
        authority = Path(security.tls_dir, "ca.crt")
        if not authority.parent.is_dir():
            raise ConfigError(f"security.tls_dir: there is no folder {security.tls_dir}")
        try:
            return ssl.create_default_context(cafile=authority if authority.exists() else None)
        except OSError as error:
            raise ConfigError(f"security.tls_dir: {authority} cannot be read ({error})") from error
    if secret is None:
        return ssl.create_default_context()
    _, certificate = _authority(secret)
    context = ssl.create_default_context(cadata=certificate.public_bytes(serialization.Encoding.PEM).decode())
    context.check_hostname = False
    return context


@contextmanager
def certificate_files(secret: Secret | None, security: SecurityConfig) -> Iterator[CertificateFiles]:
    """Yield the certificate files of a server of the run: the configured ones, or new ones that only this user can read
    and that exist during the block."""
    if security.tls_dir:
        yield CertificateFiles(str(Path(security.tls_dir, "tls.crt")), str(Path(security.tls_dir, "tls.key")))
        return
    assert secret is not None, "a certificate of the run is made with its secret"
    authority, issuer = _authority(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    made = _certificate(key.public_key(), issuer=issuer.subject, signed_by=authority, is_authority=False)
    with tempfile.TemporaryDirectory(prefix="streamrl-") as folder:
        files = CertificateFiles(str(Path(folder) / "certificate.pem"), str(Path(folder) / "key.pem"))
        Path(files.certificate).write_bytes(made.public_bytes(serialization.Encoding.PEM))
        Path(files.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        yield files


def server_context(secret: Secret | None, security: SecurityConfig) -> ssl.SSLContext:
    """Return the TLS context of a server of the run. Raises `ConfigError` for files without a valid certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with certificate_files(secret, security) as files:
        try:
            context.load_cert_chain(files.certificate, files.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"security.tls_dir: {files.certificate} and {files.key} are no certificate with its key ({error})"
            ) from error
    return context


def _authority(secret: Secret) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the run's authority: its key, and its certificate. The certificate differs each time, but has the same
    name and key."""
    number = int.from_bytes(secret.key("certificate authority"), "big") % (_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())
    return key, _certificate(key.public_key(), issuer=_NAME, signed_by=key, is_authority=True)


def _certificate(
    key: ec.EllipticCurvePublicKey, *, issuer: x509.Name, signed_by: ec.EllipticCurvePrivateKey, is_authority: bool
) -> x509.Certificate:
    subject = issuer if is_authority else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of the run")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_BEGIN).not_valid_after(_END)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    own = signed_by.public_key()
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
    if is_authority:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(signed_by, hashes.SHA256())
