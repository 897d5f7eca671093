"""Write the OpenAPI document as one HTML page, which needs no script and nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

Schema = dict[str, Any]

# Nothing may be loaded, not even from this server.
SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MOST_NESTED = 3
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} entries"),
    ("pattern", "matches {}"),
)
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .6rem .8rem; border-radius: 6px; overflow-x: auto; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
.soft { opacity: .7; }
"""


def page(document: Schema, address: str) -> str:
    """Return the page. ``address``: where the server answers, as examples name it."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    parts = [f"<h1>{escape(title)}</h1>", '<p>This page shows <a href="openapi.json">openapi.json</a>.</p>']
    for tag in document.get("tags", ()):
        operations = list(_operations(document, tag["name"], address))
        if operations:
            parts += [f"<h2>{escape(tag['name'])}</h2>", f"<p>{escape(tag['description'])}</p>", *operations]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>"
    )


def _operations(document: Schema, tag: str, address: str) -> Iterator[str]:
    """Yield the operations with a tag."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if tag in operation.get("tags", ()):
                yield _operation(document, path, method.upper(), operation, address)


def _operation(document: Schema, path: str, method: str, operation: Schema, address: str) -> str:
    about = operation.get("description", "").strip()
    first, _, rest = about.partition("\n\n")
    parts = [f"<p>{escape(paragraph)}</p>" for paragraph in rest.split("\n\n") if paragraph]
    if parameters := operation.get("parameters"):
        rows = [(item["name"], item["schema"], item.get("required", False)) for item in parameters]
        parts += ["<h4>Parameters</h4>", _table(document, rows)]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        parts += ["<h4>Body</h4>", *_schema(document, body["schema"])]
        if "example" in body:
            parts += [_example(address + path, method, body["example"])]
    parts.append("<h4>Answers</h4>")
    parts += [_answer(document, status, answer) for status, answer in operation["responses"].items()]
    head = f"<b>{method}</b><code>{escape(path)}</code> <span class=soft>{escape(first)}</span>"
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _answer(document: Schema, status: str, answer: Schema) -> str:
    content = answer.get("content", {})
    kinds = ", ".join(content)
    head = f"<code>{status}</code> {escape(answer['description'])} <span class=soft>{escape(kinds)}</span>"
    if not status.startswith("2"):
        return f"<div>{head}</div>"
    schemas = [part for kind in content.values() for part in _schema(document, kind["schema"])]
    return f"<div>{head}</div>{''.join(schemas)}"


def _example(url: str, method: str, body: Schema) -> str:
    lines = [
        f"curl -X {method} {url}",
        " -H 'content-type: application/json'",
        f" -d '{json.dumps(body)}'",
    ]
    command = " \\\n ".join(lines)
    return f"<h4>Example</h4><pre>{escape(command)}</pre>"


def _schema(document: Schema, schema: Schema) -> list[str]:
    """Return the tables of an object, or of each of several."""
    schema = _resolved(document, schema)
    if "properties" in schema:
        required = schema.get("required", ())
        rows = [(name, value, name in required) for name, value in schema["properties"].items()]
        return [_table(document, rows)]
    return [part for option in schema.get("anyOf", ()) for part in _schema(document, option)]


def _table(document: Schema, rows: Iterable[tuple[str, Schema, bool]]) -> str:
    lines = []
    for name, schema, is_required in rows:
        about = schema.get("description") or _resolved(document, schema).get("description", "")
        if "default" in schema and not isinstance(schema["default"], dict):
            about = f"{about} Default: {json.dumps(schema['default'])}.".strip()
        mark = " <b>*</b>" if is_required else ""
        kind = escape(_kind(document, schema))
        lines.append(f"<tr><td><code>{escape(name)}</code>{mark}<td>{kind}<td>{escape(about)}")
    return f"<table><tr><th>name<th>type<th>{''.join(lines)}</table>"


def _kind(document: Schema, schema: Schema, depth: int = 0) -> str:
    """Return a type in words, with its bounds."""
    schema = _resolved(document, schema)
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        options = [_kind(document, option, depth) for option in schema["anyOf"] if option != {"type": "null"}]
        return " or ".join(options)
    name = schema.get("type", "anything")
    if name == "array" and "items" in schema:
        name = f"list of {_kind(document, schema['items'], depth)}"
    elif name == "object" and "properties" in schema and depth < _MOST_NESTED:
        members = [f"{key}: {_kind(document, value, depth + 1)}" for key, value in schema["properties"].items()]
        name = f"{{{'; '.join(members)}}}"
    bounds = [words.format(schema[key]) for key, words in _BOUNDS if key in schema]
    return f"{name} ({', '.join(bounds)})" if bounds else name


def _resolved(document: Schema, schema: Schema) -> Schema:
    """Return the definition to which a schema refers."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found
