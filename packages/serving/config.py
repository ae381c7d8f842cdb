"""Settings of the serving program, as plain dataclasses. Knows no hydra and opens nothing.

What several programs share lives in `runtime.config`; here is what only a server has: ports, admission, keys, TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path

from runtime.config import (
    BackendConfig,
    CaptureConfig,
    Choice,
    DrafterConfig,
    FeaturesConfig,
    ModelConfig,
    RegistryConfig,
    SessionsConfig,
    SpeculationConfig,
    require,
    require_directory,
)
from runtime.errors import ConfigError


class AdmissionPolicy(Choice):
    REJECT = "reject"  # beyond max_concurrent: refused at once, with Retry-After
    QUEUE = "queue"  # beyond max_concurrent: waits, in order of arrival


@dataclass
class AdmissionConfig:
    policy: AdmissionPolicy = AdmissionPolicy.QUEUE
    max_concurrent: int = 64  # generations at work, of both surfaces together
    queue_max_len: int = 512  # generations that may wait; beyond it they are refused
    queue_max_wait_s: float | None = 60.0  # null: for ever

    def __post_init__(self) -> None:
        require(self.max_concurrent >= 1, "admission.max_concurrent", self.max_concurrent, "at least 1")
        require(self.queue_max_len >= 0, "admission.queue_max_len", self.queue_max_len, "0 or more")
        ok = self.queue_max_wait_s is None or self.queue_max_wait_s > 0
        require(ok, "admission.queue_max_wait_s", self.queue_max_wait_s, "more than 0 seconds, or null to wait for ever")


@dataclass
class ServerConfig:
    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free port
    grpc_port: int = 50051  # 0: any free port
    shutdown_grace_s: float = 10.0  # how long running generations may go on after SIGTERM
    max_request_mib: int = 8  # body of an HTTP request, message of a gRPC call
    max_upload_mib: int = 2048  # weights of a drafter version that come over gRPC, in many messages
    max_calls: int = 4096  # gRPC calls at once, waiting ones included; what their readers leave unread lies in memory

    def __post_init__(self) -> None:
        require(bool(self.host.strip()), "server.host", self.host, "a host name or an address")
        require(0 <= self.http_port <= 65535, "server.http_port", self.http_port, "between 0 and 65535")
        require(0 <= self.grpc_port <= 65535, "server.grpc_port", self.grpc_port, "between 0 and 65535")
        ok = self.http_port != self.grpc_port or self.http_port == 0
        require(ok, "server.grpc_port", self.grpc_port, "another port than server.http_port")
        require(self.shutdown_grace_s >= 0, "server.shutdown_grace_s", self.shutdown_grace_s, "0 seconds or more")
        ok = 1 <= self.max_request_mib <= 1024  # gRPC knows no messages beyond 2 GiB
        require(ok, "server.max_request_mib", self.max_request_mib, "between 1 and 1024")
        require(self.max_upload_mib >= 1, "server.max_upload_mib", self.max_upload_mib, "at least 1")
        require(self.max_calls >= 1, "server.max_calls", self.max_calls, "at least 1")


@dataclass
class DeprecatedEndpoint:
    """An HTTP endpoint that will go. Each of its responses says so."""

    path: str = ""  # as /openapi.json has it, such as /v1/sessions/{session_id}/fork
    sunset: str = ""  # the day when it goes, as 2031-12-31; in the future
    successor: str = ""  # path or URL of what to use in its place
    since: str | None = None  # the day from which on it is deprecated; null: it is now

    def __post_init__(self) -> None:
        require(self.path.startswith("/"), "http.deprecated.path", self.path, "a path, such as /v1/completions")
        require(bool(self.successor.strip()), "http.deprecated.successor", self.successor, "the path or URL that replaces it")
        sunset, since = (_day(name, getattr(self, name)) for name in ("sunset", "since"))
        today = datetime.now(UTC).date()
        require(sunset is not None and sunset > today, "http.deprecated.sunset", self.sunset, f"a day after today, {today}")
        assert sunset is not None
        require(since is None or since <= sunset, "http.deprecated.since", self.since, "a day before the sunset, or null")


def _day(name: str, value: str | None) -> date | None:
    try:
        return None if value is None else date.fromisoformat(value)
    except ValueError as error:
        raise ConfigError(f"http.deprecated.{name} is {value!r}; it must be a day, such as 2031-12-31.") from error


@dataclass
class HttpConfig:
    request_timeout_s: float | None = None  # from a request's arrival to its last token; null: as long as it takes
    cors_origins: list[str] = field(default_factory=list)  # sites whose pages may call, such as https://example.org; "*": all
    deprecated: list[DeprecatedEndpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        ok = self.request_timeout_s is None or self.request_timeout_s > 0
        require(ok, "http.request_timeout_s", self.request_timeout_s, "more than 0 seconds, or null")
        for origin in self.cors_origins:
            ok = origin == "*" or bool(re.fullmatch(r"https?://[^/\s]+", origin))
            require(ok, "http.cors_origins", origin, 'origins such as https://example.org, or "*"')
        paths = [endpoint.path for endpoint in self.deprecated]
        require(len(set(paths)) == len(paths), "http.deprecated", paths, "a list with each path once")


@dataclass
class AuthConfig:
    keys_file: str | None = None  # YAML or JSON, see serving/auth.py; null: everybody may do everything
    open_probes: bool = True  # health, reflection and metrics answer without a key

    def __post_init__(self) -> None:
        ok = self.keys_file is None or bool(self.keys_file.strip())
        require(ok, "auth.keys_file", self.keys_file, "a file, or null")


@dataclass
class TlsConfig:
    """Of both surfaces. PEM files; null: plain text."""

    certificate: str | None = None  # of the server, with what is needed to verify it
    private_key: str | None = None  # of the certificate
    client_ca: str | None = None  # clients must show a certificate that one of these signed

    def __post_init__(self) -> None:
        ok = (self.certificate is None) == (self.private_key is None)
        require(ok, "tls.private_key", self.private_key, "a PEM file, together with tls.certificate, or null as that is")
        ok = self.client_ca is None or self.certificate is not None
        require(ok, "tls.client_ca", self.client_ca, "null, unless tls.certificate and tls.private_key are given")


@dataclass
class TracingConfig:
    endpoint: str | None = None  # an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces; null: no traces

    def __post_init__(self) -> None:
        ok = self.endpoint is None or bool(re.fullmatch(r"https?://\S+", self.endpoint))
        require(ok, "tracing.endpoint", self.endpoint, "a URL, such as http://127.0.0.1:4318/v1/traces, or null")


@dataclass
class ServingConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    state_dir: str | None = None  # where server and trainer meet; null: <SLIPSTREAM_HOME>/state

    def __post_init__(self) -> None:
        require_directory("state_dir", self.state_dir)

    @property
    def state_path(self) -> Path:
        from runtime.models.home import absolute, home  # here, so that refusing a setting does not wait for torch

        return home() / "state" if self.state_dir is None else absolute("state_dir", self.state_dir)

    @property
    def features_path(self) -> Path:
        return self._path("features.root", self.features.root, "features")

    @property
    def registry_path(self) -> Path:
        return self._path("registry.root", self.registry.root, "registry")

    @property
    def saved_sessions_path(self) -> Path:
        return self.state_path / "sessions"

    def _path(self, setting: str, root: str | None, name: str) -> Path:
        from runtime.models.home import absolute

        return self.state_path / name if root is None else absolute(setting, root)
