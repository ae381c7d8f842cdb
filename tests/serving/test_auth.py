"""Who may call what, over both surfaces and real channels: keys, admin keys, consent at key level, TLS, client certificates."""

from __future__ import annotations

import hashlib
import json
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from runtime.errors import ConfigError, EngineUnavailable, PermissionDenied, Unauthenticated
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry, Tls
from runtime.rpc.drafters_client import DrafterClient
from runtime.types import SamplingParams, SessionOptions, Switch
from serving.auth import Keys, authorize
from serving.config import AuthConfig, ServerConfig, TlsConfig
from serving.ports import is_loopback

from .conftest import Running, StartServer, wait_for

USER, ADMIN, CLINIC = "user-key-0123456789", "admin-key-0123456789", "clinic-key-0123456789"
KEYS: list[dict[str, Any]] = [
    {"name": "ann", "key": USER},
    {"name": "trainer", "sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "admin": True},
    {"name": "clinic", "key": CLINIC, "capture": "off"},
]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def write(directory: Path, keys: Any) -> Path:
    path = directory / "keys.yaml"
    path.write_text(keys if isinstance(keys, str) else json.dumps(keys))
    return path


@pytest.fixture
def guarded(start_server: StartServer, tmp_path: Path) -> Running:
    return start_server(auth=AuthConfig(keys_file=str(write(tmp_path, KEYS))))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- the keys file ---


def test_a_key_is_found_by_itself_and_by_its_hash(tmp_path: Path) -> None:
    keys = Keys.load(write(tmp_path, KEYS))
    assert len(keys) == 3
    assert keys.find(f"Bearer {USER}").name == "ann"
    admin = authorize(keys, f"bearer  {ADMIN} ", needs_admin=True)
    assert (admin.name, admin.is_admin, admin.may_capture) == ("trainer", True, True)
    assert not keys.find(f"Bearer {CLINIC}").may_capture
    assert authorize(None, None, needs_admin=True).is_admin, "without keys everybody may do everything"


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", USER, f"Basic {USER}", f"Bearer {USER}x"])
def test_what_is_no_key_of_ours_is_unauthenticated(tmp_path: Path, authorization: str | None) -> None:
    keys = Keys.load(write(tmp_path, KEYS))
    with pytest.raises(Unauthenticated) as refused:
        keys.find(authorization)
    assert USER not in refused.value.message


def test_yaml_is_taken_as_well(tmp_path: Path) -> None:
    keys = Keys.load(write(tmp_path, f"- name: ann\n  key: {USER}\n  capture: 'off'\n"))
    assert not keys.find(f"Bearer {USER}").may_capture


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "neither YAML nor JSON"),
        ("[]", "a list of at least one key"),
        ("{}", "a list of at least one key"),
        ([5], "entry 1 must have name"),
        ([{"name": "a", "key": USER, "amdin": True}], "nothing else"),
        ([{"name": "a", "key": 5}], "key must be text"),
        ([{"name": "a", "key": USER, "admin": "yes"}], "admin must be true or false"),
        ([{"key": USER}], "has no name"),
        ([{"name": "a"}], "either key or sha256"),
        ([{"name": "a", "key": USER, "sha256": "0" * 64}], "either key or sha256"),
        ([{"name": "a", "key": "short"}], "at least 16 characters"),
        ([{"name": "a", "sha256": "zz"}], "64 hexadecimal digits"),
        ("- {name: a, key: 0123456789abcdefg, capture: off}", "capture must be text, in quotes"),
        ([{"name": "a", "key": USER, "capture": "on"}], '"inherit" or "off"'),
        ([{"name": "a", "key": USER}, {"name": "a", "key": ADMIN}], "the same name twice"),
        ([{"name": "a", "key": USER}, {"name": "b", "key": USER}], "the same key twice"),
    ],
)
def test_a_keys_file_that_cannot_be_right_is_one_sentence(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Keys.load(write(tmp_path, content))
    assert USER not in str(refused.value)


def test_a_keys_file_that_is_not_there(tmp_path: Path, start_server: StartServer) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        start_server(auth=AuthConfig(keys_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"auth\.keys_file"):
        AuthConfig(keys_file=" ")


# --- over gRPC ---


def test_the_session_service_wants_a_key(guarded: Running) -> None:
    for key in ("", "wrong-key-0123456789"):
        with RuntimeClient(guarded.ready.grpc, api_key=key) as client:
            calls: list[Callable[[], Any]] = [
                client.list_sessions,
                client.create_session,
                lambda client=client: list(client.generate("s")),  # type: ignore[misc]
            ]
            for call in calls:
                with pytest.raises(Unauthenticated):
                    call()
    with RuntimeClient(guarded.ready.grpc, api_key=USER) as client:
        session = client.create_session()
        client.append(session.session_id, text="Hi")
        assert len(list(client.generate(session.session_id, GREEDY))) > 2


def test_a_refusal_says_why_in_its_details(guarded: Running) -> None:
    with RuntimeClient(guarded.ready.grpc) as client, pytest.raises(Unauthenticated) as refused:
        client.list_sessions()
    cause = refused.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.code() is grpc.StatusCode.UNAUTHENTICATED
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(cause).details[0].Unpack(info)
    assert (info.domain, info.reason) == ("slipstream", "UNAUTHENTICATED")


def test_drafter_versions_are_for_admin_keys(guarded: Running) -> None:
    with DrafterClient(guarded.ready.grpc, api_key=USER) as client:
        with pytest.raises(PermissionDenied, match="not marked `admin`"):
            client.list()
        with pytest.raises(PermissionDenied), client.watch() as events:
            next(iter(events))
        with pytest.raises(PermissionDenied):
            client.stage_again("0" * 16)
    with DrafterClient(guarded.ready.grpc) as client, pytest.raises(Unauthenticated):
        client.list()
    with DrafterClient(guarded.ready.grpc, api_key=ADMIN) as client:
        assert client.list() == []


def health_of(running: Running) -> Any:
    with grpc.insecure_channel(running.ready.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service="slipstream.v1.RuntimeService")).status


def services_of(running: Running) -> set[str]:
    with grpc.insecure_channel(running.ready.grpc) as channel:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        return {service.name for service in answer.list_services_response.service}


def test_probes_are_open_unless_they_are_closed(guarded: Running, start_server: StartServer, tmp_path: Path) -> None:
    closed = start_server(auth=AuthConfig(keys_file=str(write(tmp_path, KEYS)), open_probes=False))
    assert health_of(guarded) == health_pb2.HealthCheckResponse.SERVING
    assert "slipstream.v1.DrafterService" in services_of(guarded)
    with grpc.insecure_channel(guarded.ready.grpc) as channel:
        newer = channel.unary_unary("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", request_serializer=bytes)
        with pytest.raises(grpc.RpcError) as absent:
            newer(b"")
        assert absent.value.code() is grpc.StatusCode.UNIMPLEMENTED, "so that tools go on with v1alpha"
    for ask in (health_of, services_of):
        with pytest.raises(grpc.RpcError) as refused:
            ask(closed)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for path in ("/livez", "/readyz", "/healthz", "/metrics"):
        assert httpx.get(f"{guarded.ready.http}{path}").status_code == 200
        assert httpx.get(f"{closed.ready.http}{path}").status_code == 401
        assert httpx.get(f"{closed.ready.http}{path}", headers=bearer(USER)).status_code == 200


# --- over HTTP ---


def test_v1_wants_a_key(guarded: Running) -> None:
    url = f"{guarded.ready.http}/v1"
    for headers in ({}, bearer("wrong-key-0123456789"), {"Authorization": f"Basic {USER}"}):
        for refused in (
            httpx.get(f"{url}/models", headers=headers),
            httpx.post(f"{url}/chat/completions", json=ASK, headers=headers),
            httpx.get(f"{guarded.ready.http}/nothing/here", headers=headers),
        ):
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == 'Bearer realm="slipstream"'
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "unauthenticated")
    assert httpx.get(f"{url}/models", headers=bearer(USER)).status_code == 200
    assert httpx.post(f"{url}/chat/completions", json=ASK, headers=bearer(USER), timeout=30).status_code == 200


def test_v1_drafters_wants_an_admin_key(guarded: Running) -> None:
    for path, method in (("/v1/drafters", "GET"), (f"/v1/drafters/{'0' * 16}/activate", "POST")):
        refused = httpx.request(method, f"{guarded.ready.http}{path}", headers=bearer(USER))
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        assert httpx.request(method, f"{guarded.ready.http}{path}").status_code == 401
    assert httpx.get(f"{guarded.ready.http}/v1/drafters", headers=bearer(ADMIN)).json()["data"] == []


# --- consent ---


def captured(running: Running) -> int:
    capture = running.parts.capture
    assert capture is not None
    return capture.counters().get("captured", 0)


def test_nothing_of_a_key_without_capture_becomes_a_row(guarded: Running) -> None:
    with RuntimeClient(guarded.ready.grpc, api_key=CLINIC) as client:
        session = client.create_session(SessionOptions(capture=Switch.ON))
        assert session.options.capture is Switch.OFF
        client.append(session.session_id, text="Hi")
        list(client.generate(session.session_id, GREEDY))
        fork = client.fork_session(session.session_id, options=SessionOptions(capture=Switch.ON))
        assert fork.options.capture is Switch.OFF
        list(client.generate(fork.session_id, GREEDY))
    assert (
        httpx.post(f"{guarded.ready.http}/v1/chat/completions", json=ASK, headers=bearer(CLINIC), timeout=30).status_code == 200
    )
    assert captured(guarded) == 0
    with RuntimeClient(guarded.ready.grpc, api_key=USER) as client:
        session = client.create_session()
        client.append(session.session_id, text="Hi")
        list(client.generate(session.session_id, GREEDY))
    wait_for(lambda: captured(guarded) == 1)


def test_a_fork_of_what_must_not_be_captured_is_not_captured_either(guarded: Running) -> None:
    with RuntimeClient(guarded.ready.grpc, api_key=USER) as ann, RuntimeClient(guarded.ready.grpc, api_key=CLINIC) as clinic:
        session = clinic.create_session()
        clinic.append(session.session_id, text="secret")
        for options in (None, SessionOptions(), SessionOptions(capture=Switch.ON)):
            fork = ann.fork_session(session.session_id, options=options)
            assert fork.options.capture is Switch.OFF
            list(ann.generate(fork.session_id, GREEDY))
    assert captured(guarded) == 0


def test_a_key_without_capture_keeps_out_of_sessions_that_may_be_captured(guarded: Running) -> None:
    with RuntimeClient(guarded.ready.grpc, api_key=USER) as ann, RuntimeClient(guarded.ready.grpc, api_key=CLINIC) as clinic:
        session = ann.create_session()
        ann.append(session.session_id, text="Hi")
        ann.save_session(session.session_id, "ann")
        for call in (
            lambda: clinic.append(session.session_id, text="secret"),
            lambda: list(clinic.generate(session.session_id, GREEDY)),
            lambda: clinic.restore_session("ann"),
        ):
            with pytest.raises(PermissionDenied, match="capture: off"):
                call()
        assert [one.session_id for one in ann.list_sessions()] == [session.session_id]
        fork = clinic.fork_session(session.session_id)
        assert fork.options.capture is Switch.OFF
        list(clinic.generate(fork.session_id, GREEDY))


def test_what_must_not_be_captured_keeps_out_of_a_session_that_may_be(guarded: Running) -> None:
    url = f"{guarded.ready.http}/v1/chat/completions"
    first = httpx.post(url, json=ASK, headers=bearer(USER), timeout=30)
    said = [*ASK["messages"], first.json()["choices"][0]["message"], {"role": "user", "content": "More"}]
    there = {"x-session-id": first.headers["x-session-id"]}
    wait_for(lambda: captured(guarded) == 1)
    for headers, more in ((bearer(CLINIC), {}), (bearer(USER), {"store": False})):
        refused = httpx.post(url, json=ASK | {"messages": said} | more, headers=headers | there, timeout=30)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "permission_denied"
    assert captured(guarded) == 1


# --- beyond this machine ---


def test_listening_beyond_this_machine_without_keys_is_told_loudly(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public = ServerConfig(host="0.0.0.0", http_port=0, grpc_port=0, shutdown_grace_s=0.5)
    start_server(server=public, auth=AuthConfig(keys_file=str(write(tmp_path, KEYS))))
    start_server()
    assert "ANYBODY" not in caplog.text
    start_server(server=public)
    [warning] = [record for record in caplog.records if "ANYBODY" in record.message]
    assert warning.levelno == logging.WARNING
    assert "auth.keys_file" in warning.message


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)])
def test_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


# --- TLS ---


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


class Files:
    """PEM files of a server, an authority and a client."""

    def __init__(self, authority: trustme.CA, directory: Path) -> None:
        self.ca = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.server, self.server_key = self._issue(authority, directory, "127.0.0.1")
        self.client, self.client_key = self._issue(authority, directory, "client.test")

    @staticmethod
    def _issue(authority: trustme.CA, directory: Path, name: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(name)
        certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> Files:
    return Files(authority, tmp_path)


def test_tls_on_both_surfaces(files: Files, start_server: StartServer) -> None:
    running = start_server(tls=TlsConfig(str(files.server), str(files.server_key)))
    assert running.ready.http.startswith("https://")
    with RuntimeClient(running.ready.grpc, tls=Tls(files.ca)) as client:
        session = client.create_session()
        client.append(session.session_id, text="Hi")
        assert list(client.generate(session.session_id, GREEDY))
    trusting = ssl.create_default_context(cafile=str(files.ca))
    assert httpx.get(f"{running.ready.http}/readyz", verify=trusting).json() == {"status": "serving"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.ready.http}/readyz")
    for stranger in ({}, {"tls": Tls()}):
        client = RuntimeClient(running.ready.grpc, retry=Retry(max_attempts=1), **stranger)
        with client, pytest.raises(EngineUnavailable, match="cannot be reached"):
            client.list_sessions()


def test_client_certificates(files: Files, start_server: StartServer) -> None:
    running = start_server(tls=TlsConfig(str(files.server), str(files.server_key), client_ca=str(files.ca)))
    with RuntimeClient(running.ready.grpc, tls=Tls(files.ca, files.client, files.client_key)) as client:
        assert client.list_sessions() == []
    client = RuntimeClient(running.ready.grpc, tls=Tls(files.ca), retry=Retry(max_attempts=1))
    with client, pytest.raises(EngineUnavailable, match="cannot be reached"):
        client.list_sessions()
    trusting = ssl.create_default_context(cafile=str(files.ca))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.ready.http}/readyz", verify=trusting)
    trusting.load_cert_chain(str(files.client), str(files.client_key))
    assert httpx.get(f"{running.ready.http}/readyz", verify=trusting).status_code == 200


def test_tls_settings_that_cannot_work_are_one_sentence(files: Files, start_server: StartServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.private_key"):
        TlsConfig(certificate="a.pem")
    with pytest.raises(ConfigError, match=r"tls\.client_ca"):
        TlsConfig(client_ca="a.pem")
    with pytest.raises(ConfigError, match=r"tls\.certificate .*none\.pem cannot be read"):
        start_server(tls=TlsConfig(str(tmp_path / "none.pem"), str(files.server_key)))
    with pytest.raises(ConfigError, match="no PEM files of one pair"):
        start_server(tls=TlsConfig(str(files.server), str(files.client_key)))
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match=r"tls\.client_ca .* holds no PEM certificate"):
        start_server(tls=TlsConfig(str(files.server), str(files.server_key), str(tmp_path / "empty.pem")))
