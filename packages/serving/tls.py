"""TLS of both surfaces from PEM files: what gRPC takes, and what uvicorn takes. ConfigError if a file does not do."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from runtime.errors import ConfigError
from serving.config import TlsConfig


def check(config: TlsConfig) -> None:
    """Refuse files that cannot be used before anything listens: gRPC would say so in its log only, call by call."""
    if config.certificate is None or config.private_key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for setting in ("certificate", "private_key", "client_ca"):
        _read(setting, getattr(config, setting))
    try:
        context.load_cert_chain(config.certificate, config.private_key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.certificate {config.certificate} and tls.private_key {config.private_key} are no PEM files of one pair "
            f"({error.reason or error}); give a certificate and its own key."
        ) from error
    try:
        if config.client_ca is not None:
            context.load_verify_locations(config.client_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"tls.client_ca {config.client_ca} holds no PEM certificate; give one of your authority.") from error


def grpc_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """None: plain text."""
    certificate, key = _read("certificate", config.certificate), _read("private_key", config.private_key)
    if certificate is None or key is None:
        return None
    authority = _read("client_ca", config.client_ca)
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=authority is not None)


def uvicorn_settings(config: TlsConfig) -> dict[str, Any]:
    return {
        "ssl_certfile": config.certificate,
        "ssl_keyfile": config.private_key,
        "ssl_ca_certs": config.client_ca,
        "ssl_cert_reqs": ssl.CERT_NONE if config.client_ca is None else ssl.CERT_REQUIRED,
    }


def _read(setting: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{setting} {path} cannot be read ({error.strerror}); give a PEM file.") from error
