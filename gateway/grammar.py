"""Read the grammar that an output must follow from OpenAI's, vLLM's and SGLang's fields."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar
from gateway.fields import ClosedFields, Fields

# Characters with a meaning in regular expressions.
_SPECIAL = re.compile(r"[][\\.+*?(){}|^$]")

Choices = Annotated[list[str], Field(min_length=1)]


class JsonSchemaFormat(Fields):
    """OpenAI's wrapper of a schema. The output follows the schema, whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ClosedFields):
    """vLLM's field for grammars."""

    json_: Any = Field(None, alias="json", description="A JSON schema, as an object or as its text.")
    regex: str | None = None
    json_object: bool | None = None
    choice: Choices | None = Field(None, description="The output is one of these texts.")
    grammar: str | None = Field(None, description="A grammar in EBNF (GBNF) or llguidance's Lark form.")


class GrammarFields(Fields):
    """Fields of both OpenAI endpoints; a request may set only one grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = Field(None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="vLLM's older name of structured_outputs.regex.")
    guided_grammar: str | None = Field(None, description="vLLM's older name of structured_outputs.grammar.")
    guided_choice: Choices | None = Field(None, description="vLLM's older name of structured_outputs.choice.")
    json_schema: Any = Field(None, description="SGLang's name of structured_outputs.json.")
    regex: str | None = Field(None, description="SGLang's name of structured_outputs.regex.")
    ebnf: str | None = Field(None, description="SGLang's name of structured_outputs.grammar.")


def requested_grammar(fields: GrammarFields) -> tuple[Grammar | None, str]:
    """Return a body's grammar and the field that set it. Raises InvalidRequestError."""
    wanted: list[tuple[Grammar, str]] = []
    if (response_format := fields.response_format) is not None and response_format.type != "text":
        wanted.append((_of_response_format(response_format), "response_format"))
    if (outputs := fields.structured_outputs) is not None:
        wanted += _all(
            "structured_outputs",
            schema=outputs.json_,
            regex=outputs.regex,
            json_object=outputs.json_object or False,
            choices=outputs.choice,
            grammar=outputs.grammar,
        )
    wanted += _all("guided_json", schema=fields.guided_json)
    wanted += _all("guided_regex", regex=fields.guided_regex)
    wanted += _all("guided_choice", choices=fields.guided_choice)
    wanted += _all("guided_grammar", grammar=fields.guided_grammar)
    wanted += _all("json_schema", schema=fields.json_schema)
    wanted += _all("regex", regex=fields.regex)
    wanted += _all("ebnf", grammar=fields.ebnf)
    return the_one(wanted)


def schema_grammar(field: str, value: object) -> Grammar:
    """Return the grammar of a JSON schema, given as an object or as text.

    Raises InvalidRequestError if it is no schema, or too long.
    """
    if isinstance(value, str):
        text = value
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"{field} is not valid JSON: {error}", field=field) from None
    else:
        text = ""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be a JSON schema: an object", field=field)
    if not text:
        try:
            text = orjson.dumps(value).decode()
        except orjson.JSONEncodeError as error:
            raise InvalidRequestError(f"{field} cannot be written as JSON: {error}", field=field) from None
    return checked(field, Grammar("json_schema", text))


def checked(field: str, grammar: Grammar) -> Grammar:
    """Return the grammar. Raises InvalidRequestError if it is too long."""
    limits.check_grammar(field, grammar)
    return grammar


def the_one(wanted: list[tuple[Grammar, str]]) -> tuple[Grammar | None, str]:
    """Return the only grammar that was set, with its field. Raises InvalidRequestError for two."""
    if len(wanted) > 1:
        (_, first), (_, second), *_ = wanted
        beside = "" if first == second else f", beside {first}"
        raise InvalidRequestError(f"{second} asks for a second form of the output{beside}", field=second)
    return wanted[0] if wanted else (None, "")


def _of_response_format(fields: ResponseFormat) -> Grammar:
    if fields.type == "json_object":
        return Grammar("json_object")
    if fields.json_schema is None or fields.json_schema.schema_ is None:
        raise InvalidRequestError(
            "response_format of type json_schema needs json_schema.schema", field="response_format"
        )
    return schema_grammar("response_format", fields.json_schema.schema_)


def _all(
    field: str,
    *,
    schema: object = None,
    regex: str | None = None,
    json_object: bool = False,
    choices: list[str] | None = None,
    grammar: str | None = None,
) -> list[tuple[Grammar, str]]:
    """Return the grammars set in this field."""
    found = []
    if schema is not None:
        found.append((schema_grammar(field, schema), field))
    if regex is not None:
        found.append((checked(field, Grammar("regex", regex)), field))
    if json_object:
        found.append((Grammar("json_object"), field))
    if choices is not None:
        texts = (_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices)
        found.append((checked(field, Grammar("regex", f"({'|'.join(texts)})")), field))
    if grammar is not None:
        found.append((checked(field, Grammar("lark", grammar)), field))
    return found
