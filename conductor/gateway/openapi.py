"""The OpenAPI document, completed: bodies of the endpoints that read them without FastAPI for speed and clear errors, the
errors that every endpoint may answer with, and the API key.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from conductor.gateway.access import PUBLIC_PATHS
from conductor.gateway.generate import KINDS
from conductor.gateway.tokens import DetokenizeBody, TokenizeBody

REF_TEMPLATE = "#/components/schemas/{model}"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
REFUSALS = {"400": "A field or header is wrong", "404": "Not found"}
KEY_REFUSALS = {"401": "The API key is missing or not known", "403": "The tenant is disabled"}
LOAD_REFUSALS = {"429": "Refused; Retry-After says when to come back", "503": "Unavailable; Retry-After likewise"}
BODY_REFUSALS = {"408": "Body too slow", "413": "Body too large"}
JSON_BODIES: dict[str, type[BaseModel]] = {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with everything in it that FastAPI does not see."""
    bodies = {**{path: kind.schema for path, kind in KINDS.items()}, **JSON_BODIES}
    _, definitions = models_json_schema([(schema, "validation") for schema in bodies.values()], ref_template=REF_TEMPLATE)
    components = document.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], "Error": ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, kind in KINDS.items():
        document["paths"][path] = {"post": generation(kind.schema.__doc__ or "")}
    for path, schema in bodies.items():
        document["paths"][path]["post"]["requestBody"] = json_body(schema)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _add_refusals(path, operation)
    metrics = document["paths"]["/metrics"]["get"]["responses"]["200"]
    metrics["content"] = {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    return document


def generation(summary: str) -> dict[str, Any]:
    success = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer, whole or as server-sent events", "content": success}},
    }


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": REF_TEMPLATE.format(model=schema.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _add_refusals(path: str, operation: dict[str, Any]) -> None:
    failure = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model="Error")}}}
    words = REFUSALS | LOAD_REFUSALS
    if path not in PUBLIC_PATHS:
        words = words | KEY_REFUSALS
        operation["security"] = [{"key": []}, {}]  # without a keys file no key is asked for
    if "requestBody" in operation:
        words = words | BODY_REFUSALS
    operation["responses"].pop("422", None)
    operation["responses"].update(
        {code: {"description": description, "content": failure} for code, description in sorted(words.items())}
    )
