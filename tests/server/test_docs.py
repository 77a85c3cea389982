"""docs/api.md says what the API does: fields, endpoints and codes are compared with the code."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from engine import errors
from engine.api import errors as api_errors
from engine.api.schema import SpeechBody
from engine.server import create_app
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.S)))


@pytest.mark.parametrize("name", [f for f in SpeechBody.model_fields if not f.startswith("subtalker_")])
def test_every_field_is_explained(name):
    assert any(re.match(rf"{name}\b", quoted) for quoted in QUOTED), name


def test_every_endpoint_is_listed(engine):
    paths = TestClient(create_app(engine)).get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in TEXT or f"`{path}`" in TEXT, (method, path)


def test_every_code_in_the_table_is_a_code_with_that_status():
    known = {}
    for module in (errors, api_errors):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, errors.ChorusError):
                known.setdefault(kind.code, kind.http_status)
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", TEXT, re.M)
    assert len(rows) >= 8
    for statuses, codes in rows:
        for code in re.findall(r"`(\w+)`", codes):
            assert str(known[code]) in statuses, code


def test_the_headers_are_the_ones_sent(engine):
    headers = TestClient(create_app(engine)).post("/v1/audio/speech", json={"input": "Hi."}).headers
    documented = {n for n in QUOTED if n.startswith("x-")} | {f"x-chorus{n}" for n in QUOTED if re.match(r"-[a-z]+", n)}
    documented -= {n for n in documented if n.startswith("x-chorus--")}
    assert documented <= set(headers), documented - set(headers)
    assert {n for n in headers if n.startswith("x-chorus-")} <= documented
