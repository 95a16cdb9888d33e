"""The base of all document models: strict keys, and errors of one sentence that name the path of the key.

A model describes a document; pydantic checks the document and gives its JSON Schema. The package that reads a
document gives it its meaning. Unknown keys are errors, so that no misspelt key is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails

from kvplace.core.errors import BadBody
from kvplace.core.strict_json import did_you_mean, known_keys, shown

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_Model = TypeVar("_Model", bound="DocumentModel")
_Value = TypeVar("_Value")


class DocumentModel(BaseModel):
    """A mapping in a document, keys in camel case; null is an error, never the same as a missing key."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        alias_generator=to_camel,
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        if isinstance(content, Mapping):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            checked_by(lambda keys: known_keys(keys, known))(content)
        return content

    @field_validator("*", mode="before")
    @classmethod
    def _check_null(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("null is not a value; leave the key out")
        return value


def read_model(model: type[_Model], content: object, what: str) -> _Model:
    """Check a document against its model; raises BadBody with the first error, which begins with `what`."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        sentence = _sentence(error.errors(include_url=False)[0])
    raise BadBody(f"{what}: {sentence}" if what else sentence)


def checked_by(read: Callable[[Any], _Value]) -> Callable[[Any], _Value]:
    """Make a validator of a function that raises BadBody; its sentence is kept."""

    def validate(value: Any) -> _Value:
        try:
            return read(value)
        except BadBody as error:
            raise ValueError(str(error)) from None

    return validate


def json_schema(model: type[DocumentModel]) -> dict[str, Any]:
    """Give the JSON Schema of a document."""
    return {"$schema": DIALECT} | model.model_json_schema(schema_generator=_SchemaGenerator)


def numbered(name: str, count: int | None) -> list[str]:
    """Name `count` equal things web-01, web-02, ...; without a count there is one, with the plain name."""
    if count is None:
        return [name]
    width = max(2, len(str(count)))
    return [f"{name}-{number:0{width}d}" for number in range(1, count + 1)]


def unique(names: Iterable[str], what: str) -> None:
    """Raise ValueError for a name that is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"duplicate {what} {shown(name)}")
        seen.add(name)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{shown(text)} has characters that cannot be printed")
    return text


Text = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_one_line)]
"""A string of one line."""

_RULES = {
    "model_type": "be a mapping",
    "tuple_type": "be a list",
    "string_type": "be a string",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "enum": "be {expected}",
    "literal_error": "be {expected}",
    "string_pattern_mismatch": "match {pattern}",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than_equal": "be at most {le}",
    "string_too_short": "not be empty",
    "string_too_long": "have at most {max_length} characters",
    "too_short": "not be empty",
    "too_long": "have at most {max_length} entries",
}
"""The rule for a value, by pydantic's name of the error."""


def _sentence(error: ErrorDetails) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).lstrip(".")
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return f"{path}: {context['error']}" if path else str(context["error"])
    if error["type"] == "missing":
        return f"{path} is missing"
    rule = _RULES.get(error["type"], "")
    rule = f"it must {rule.format(**context)}" if rule else error["msg"]
    if error["type"] in ("enum", "literal_error"):
        rule += did_you_mean(error["input"], re.findall(r"'([^']*)'", context["expected"]))
    return f"{path or 'the document'} is {shown(error['input'])}; {rule}"


class _SchemaGenerator(GenerateJsonSchema):
    """Leaves out parts without information here: null, defaults of null, and titles made of keys."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        has_default = schema.get("default") is not None
        return super().default_schema(schema) if has_default else self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
