"""TLS by certificate files, replaced while the gateway runs."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from conductor.gateway.settings import GatewaySettings
from conductor.gateway.tls import TlsError, certificates
from tests.gateway.conftest import StartGateway
from tests.gateway.test_lifecycle import eventually

START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, as PEM files that replace former ones in one step."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(START).not_valid_after(START.replace(year=2100))
    built = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate = built.sign(key, hashes.SHA256())
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    contents = {"cert": certificate.public_bytes(encoding)}
    contents["key"] = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    for kind, content in contents.items():
        (folder / f"{kind}.draft").write_bytes(content)
        os.replace(folder / f"{kind}.draft", folder / f"{kind}.pem")
    return folder / "cert.pem", folder / "key.pem"


def served_name(port: int) -> str:
    """The common name of the certificate that a port shows."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(raw) as wrapped:
            shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return str(x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_the_api_speaks_tls(start_gateway: StartGateway, tmp_path: Path) -> None:
    """Verified by a client that trusts the certificate; plain HTTP gets nothing."""
    cert, key = write_certificate(tmp_path, "first")
    live = start_gateway(tls_cert_file=cert, tls_key_file=key)
    context = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=f"https://localhost:{live.port}", verify=context, timeout=20) as client:
        answer = client.post("/v1/completions", json={"model": "test-model", "prompt": "x"})
    assert answer.json()["choices"][0]["text"] == "hello"
    with pytest.raises(httpx.RemoteProtocolError):
        live.client.get("/health")


def test_certificates_are_replaced_without_a_restart(start_gateway: StartGateway, tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "first")
    live = start_gateway(tls_cert_file=cert, tls_key_file=key, files_check_s=0.05)
    assert served_name(live.port) == "first"
    write_certificate(tmp_path, "second")
    eventually(lambda: served_name(live.port) == "second")


def test_a_certificate_that_cannot_be_used_leaves_the_former(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "first")
    loaded = certificates(GatewaySettings(tls_cert_file=cert, tls_key_file=key))
    assert loaded is not None
    assert not loaded.reload_if_changed()
    cert.write_text("no certificate")
    os.utime(cert, (1, 1))
    assert not loaded.reload_if_changed()
    write_certificate(tmp_path, "second")
    assert loaded.reload_if_changed()


def test_files_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "first")
    with pytest.raises(TlsError, match="there is no TLS file"):
        certificates(GatewaySettings(tls_cert_file=tmp_path / "none", tls_key_file=key))
    with pytest.raises(TlsError, match=r"cert\.pem and key .*cert\.pem cannot be used"):
        certificates(GatewaySettings(tls_cert_file=cert, tls_key_file=cert))
    with pytest.raises(ValidationError, match="only together"):
        GatewaySettings(tls_cert_file=cert)


def test_an_old_protocol_is_refused(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "first")
    loaded = certificates(GatewaySettings(tls_cert_file=cert, tls_key_file=key))
    assert loaded is not None
    assert loaded.context.minimum_version == ssl.TLSVersion.TLSv1_2
