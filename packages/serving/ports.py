"""Taking the two ports before anything slow happens, so that a port in use is one sentence at once and not a surprise later."""

from __future__ import annotations

import ipaddress
import socket

from runtime.errors import ConfigError
from serving import tls
from serving.config import ServerConfig, TlsConfig
from serving.grpc_server import GrpcServer

BACKLOG = 2048


def open_http(config: ServerConfig) -> socket.socket:
    """A listening socket; clients that come early wait in its backlog. ConfigError if the port cannot be had."""
    try:
        return _listen(config.host, config.http_port)
    except OSError as error:
        raise _refusal("server.http_port", config.http_port, config.host, error) from error


def open_grpc(server: GrpcServer, config: ServerConfig, tls_config: TlsConfig) -> int:
    """The port that gRPC got. ConfigError if it cannot be had."""
    try:
        _listen(config.host, config.grpc_port).close()  # says plainly what is wrong, where gRPC prints pages
        return server.bind(config.host, config.grpc_port, tls.grpc_credentials(tls_config))
    except OSError as error:
        raise _refusal("server.grpc_port", config.grpc_port, config.host, error) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)}
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _refusal(setting: str, port: int, host: str, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return ConfigError(
            f"server.host is {host!r}, which is no address ({why}); give one of this machine, 127.0.0.1 or 0.0.0.0."
        )
    return ConfigError(f"{setting} is {port}, and {host}:{port} cannot be opened ({why}); give a free port, or 0 for any.")
