"""YAML as people write it into configuration and keys files, read more strictly than the language asks for.

YAML takes the last of two equal keys in silence, by which a section that somebody has written twice loses its first half. Here
it is an error, as is nesting that would exhaust the stack.
"""

from __future__ import annotations

from typing import Any

import yaml


class YamlError(ValueError):
    """The text cannot be used; the message is to stand behind the name of the file."""


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [
            key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
        ]
        repeated = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if repeated is not None:
            raise YamlError(f"has the key {repeated!r} twice in the mapping at line {node.start_mark.line + 1}; allowed: once")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """What `text` says. Raises `YamlError`, which quotes none of it but a key's name: a file may hold secrets."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise YamlError(f"is not valid YAML: {error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise YamlError("is nested too deeply") from None
