"""The OpenAPI schema, tried out: whatever fits or does not fit it is answered, never with a fault of ours."""

from __future__ import annotations

import tempfile

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from engine.server import create_app
from tests.server.standin import StandIn

APP = create_app(StandIn(tempfile.mkdtemp(), slots=10_000))
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


OPERATIONS = [(path, method) for path, methods in APP.openapi()["paths"].items() for method in methods]


def trial(path: str, method: str):
    """The test of one operation."""

    @schema.include(path=path, method=method.upper()).parametrize()
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def test(case):
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    return test


# A name for each: `parametrize` gives all operations of one test the same, and of those pytest-xdist runs one only.
for _path, _method in OPERATIONS:
    _name = "_".join(part.strip("{}") for part in _path.split("/") if part)
    globals()[f"test_no_request_to_{_method}_{_name}_finds_a_fault"] = trial(_path, _method)


def test_a_stream_of_events_fits_its_schema():
    """Found by the test above in one run of many: the events were described as bare strings."""
    case = schema["/v1/audio/speech"]["POST"].Case(
        body={"input": "Hello.", "stream_format": "sse"}, media_type="application/json"
    )
    response = case.call()
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)


def test_the_schema_names_every_endpoint():
    paths = TestClient(APP).get("/openapi.json").json()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == {
        ("/v1/audio/speech", "post"),
        ("/v1/audio/voices", "get"),
        ("/v1/audio/voices", "post"),
        ("/v1/audio/voices/{name}", "delete"),
        ("/v1/models", "get"),
        ("/health", "get"),
        ("/ready", "get"),
        ("/metrics", "get"),
    }


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data"])
def test_the_body_is_documented(kind):
    operation = TestClient(APP).get("/openapi.json").json()["paths"]["/v1/audio/speech"]["post"]
    body = operation["requestBody"]["content"][kind]["schema"]
    assert body["required"] == ["input"] and body["additionalProperties"] is False
    assert {"voice", "stream_format", "ref_audio", "seed", "chunk_schedule"} <= set(body["properties"])
