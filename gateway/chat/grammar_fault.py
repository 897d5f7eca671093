"""Name the schema at fault in a verifier's refusal of a grammar that the gateway wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping

from foretoken.errors import ForetokenError

# The verifier names the line of the grammar where a schema begins.
_SCHEMA_FAULT = re.compile(r"the grammar cannot be used: at (\d+)\(\d+\): failed to compile JSON schema: (.+)")


def name_grammar_fault(error: ForetokenError, field: str, schema_tools: Mapping[int, str | None]) -> None:
    """Turn the error about a grammar into one about what the client sent.

    ``field``: the client's field that asked for the grammar. ``schema_tools``: which tool's schema
    begins on a line of the grammar; None: the answer's.
    """
    error.field = field
    found = _SCHEMA_FAULT.fullmatch(error.message)
    if found is None or int(found[1]) not in schema_tools:
        return
    tool = schema_tools[int(found[1])]
    if tool is None:
        error.message = f"the JSON schema cannot be used: {found[2]}"
    else:
        error.message = f"the JSON schema of the tool {tool!r} cannot be used: {found[2]}"
        error.field = "tools"
