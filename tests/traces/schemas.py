"""The schemas of the repository, and a check of what the commands print against them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from referencing import Registry, Resource

import traces

FOLDER = Path(traces.__file__).parent
SCHEMAS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.schema.json")}
REGISTRY: Registry = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


def check(text: str, name: str) -> None:
    """Raises ValidationError unless `text` is JSON that keeps to the schema in `traces/NAME.schema.json`."""
    schema = SCHEMAS[f"{name}.schema.json"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema, registry=REGISTRY).validate(json.loads(text))
