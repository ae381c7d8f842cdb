"""The OpenAPI document tells the truth: whatever is sent to its endpoints, only what it says comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from ..conftest import Running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Left to their own tests: a switch of drafters changes the server for everybody.
LEFT_OUT = {"/v1/drafters/{version}/activate"}


@pytest.fixture(scope="module")
def document(shared_server: Running) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{shared_server.ready.http}/openapi.json").json()
    return answer


def test_every_endpoint_is_there_with_its_refusals(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/sessions", "/v1/drafters", "/livez", "/metrics"):
        assert path in paths
    for operations in paths.values():
        for operation in operations.values():
            assert {"200", "400", "401", "404", "429", "503"} <= operation["responses"].keys()
            assert "422" not in operation["responses"]


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, method) for path, all_of_it in document["paths"].items() for method in all_of_it if path not in LEFT_OUT]


@pytest.mark.timeout(600)
def test_only_what_is_documented_comes_back(running: Running, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=running.ready.http)
    for path, method in operations(document):
        try_one(schema[path][method.upper()])
        running.wait_until_idle(60)


def try_one(operation: Any) -> None:
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and case.body.get("max_tokens"):
            case.body["max_tokens"] = 4  # what is long takes long; that it is taken is tested elsewhere
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)

    check()
