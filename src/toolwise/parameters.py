"""A tool's parameters as a compiled JSON schema: what arguments are checked by, when called and when scored."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from toolwise.errors import ConfigError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

_MORE_PROPERTIES = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}


# Keyed by the schema's text, not by its identity: tasks that bring equal schemas share one validator, and a
# schema that was changed in place gets another.
@lru_cache(maxsize=1024)
def compile_parameters(tool: str, parameters: str) -> Draft202012Validator:
    """The validator of `tool`'s parameters, given as JSON text."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    schema = json.loads(parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"tool {tool}: its parameters are no JSON schema: {error.message}") from error
    # JSON schema lets unnamed properties pass; in a call, an argument that a tool lacks is a mistake.
    if isinstance(schema, dict) and schema.get("properties") and not schema.keys() & _MORE_PROPERTIES:
        schema.setdefault("additionalProperties", False)
    # An empty registry: a $ref must never make us fetch something from the network.
    return Draft202012Validator(schema, registry=Registry())
