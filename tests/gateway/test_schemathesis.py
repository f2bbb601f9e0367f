"""The OpenAPI document as an outside tool reads it: whatever it allows or forbids, the gateway never answers with a 5xx, and
what it answers is what the document says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.gateway.conftest import Live, running_gateway

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
EXPECTED = {
    "GET /health",
    "GET /metrics",
    "GET /ready",
    "GET /v1/decisions/{decision_id}",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /detokenize",
    "POST /tokenize",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
}
WITH_BODIES = ["POST /detokenize", "POST /tokenize", "POST /v1/chat/completions", "POST /v1/completions"]
ALLOWED, FORBIDDEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Live]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def schema(fuzzed: Live) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


def test_the_document_has_every_operation(schema: schemathesis.BaseSchema) -> None:
    assert {found.ok().label for found in schema.get_all_operations()} == EXPECTED


@pytest.mark.parametrize(
    ("mode", "label"),
    [(ALLOWED, label) for label in sorted(EXPECTED)] + [(FORBIDDEN, label) for label in WITH_BODIES],
    ids=str,
)
def test_no_request_breaks_the_gateway(
    schema: schemathesis.BaseSchema, fuzzed: Live, label: str, mode: schemathesis.GenerationMode
) -> None:
    """Requests that the document allows, and requests that it forbids."""
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().label == label]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=fuzzed.url, checks=CHECKS)

    check()
