"""The OpenAPI document of the endpoints that bypass FastAPI's own body handling for speed."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from conductor.gateway.generate import KINDS

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
FAILURES = {"400": "A field is wrong", "408": "Body too slow", "413": "Body too large", "429": "Refused", "503": "Unavailable"}


def add_generation(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the generating endpoints in it."""
    schemas = [(kind.schema, "validation") for kind in KINDS.values()]
    _, definitions = models_json_schema(schemas, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions["$defs"], Error=ERROR)
    for path, kind in KINDS.items():
        document["paths"][path] = {"post": operation(kind.schema.__name__, kind.schema.__doc__ or "")}
    return document


def operation(schema: str, summary: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=schema)}}}
    failure = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model="Error")}}}
    success = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "The answer, whole or as server-sent events", "content": success},
            **{code: {"description": words, "content": failure} for code, words in FAILURES.items()},
        },
    }
