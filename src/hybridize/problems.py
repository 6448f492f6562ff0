"""Validation errors as a person wants them: one line a problem, its path, the nearest valid name."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

Location = Sequence[str | int]


def describe(error: ValidationError, model: type[BaseModel], raw: Any) -> list[str]:
    """One line for each problem of `error`, in the words and paths of `raw`, the data that `model` refused."""
    return [_describe_one(problem, model, raw) for problem in error.errors(include_url=False)]


def nearest(name: str, valid: Sequence[str]) -> str:
    """`did you mean 'x'?` where a valid name is close, else the list of what is allowed."""
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed are {', '.join(valid)}" if valid else "nothing is allowed here"


def _describe_one(problem: Any, model: type[BaseModel], raw: Any) -> str:
    location, kind, value = problem["loc"], problem["type"], problem["input"]
    context = problem.get("ctx", {})
    path = _path(location, raw, keep_last=kind == "missing")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        if location[0] == "steps" and len(location) == 3:
            return f"{path}: unknown step; {nearest(location[-1], tags_at(model, location[:-1]))}"
        return f"{path}: unknown key; {nearest(location[-1], keys_at(model, location[:-1]))}"
    if kind in ("literal_error", "enum"):
        return f"{path}: {value!r} is not allowed; {nearest(value, _quoted(context['expected']))}"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        return f"{path}.{tag}: {context['tag']!r} is not allowed; {nearest(context['tag'], _quoted(context['expected_tags']))}"
    if kind == "union_tag_not_found":
        return f"{path}: needs the key {context['discriminator']}"
    if kind == "missing":
        return f"{path}: is required"
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"{path}: must be a mapping such as {{key: value}}, not {value!r}"
    if kind in ("tuple_type", "list_type"):
        return f"{path}: must be a list such as [a, b], not {value!r}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = "" if kind == "value_error" else f", not {value!r}"
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"


def _quoted(expected: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return re.findall(r"'([^']*)'", expected)


def _path(location: Location, raw: Any, keep_last: bool) -> str:
    """`location` as `steps[0].transfer.lr`, without the parts (union tags, shorthands) that `raw` does not write."""
    text, here = "", raw
    for index, part in enumerate(location):
        if _holds(here, part):
            here = here[part]
        elif not (keep_last and index == len(location) - 1):
            continue
        if isinstance(part, str) and part.isidentifier():
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text.removeprefix(".")


def _holds(here: Any, part: str | int) -> bool:
    if isinstance(here, Mapping):
        return part in here
    return isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)


def keys_at(model: Any, location: Location) -> list[str]:
    """The keys that the mapping at `location` below `model` may have; union tags in `location` narrow the choice."""
    return sorted({name for alternative in _types_at(model, location) for name in _fields(alternative)})


def tags_at(model: Any, location: Location) -> list[str]:
    """The kinds that may stand at `location` below `model`."""
    return sorted(tag for alternative in _types_at(model, location) if (tag := _tag(alternative)) is not None)


def _types_at(model: Any, location: Location) -> list[Any]:
    here = _alternatives(model)
    for part in location:
        here = _descend(here, part)
    return here


def _descend(here: list[Any], part: str | int) -> list[Any]:
    below: list[Any] = []
    for alternative in here:
        arguments = typing.get_args(alternative)
        if part in _fields(alternative):
            below += _alternatives(_fields(alternative)[str(part)])
        elif typing.get_origin(alternative) is dict:
            below += _alternatives(arguments[1])
        elif typing.get_origin(alternative) in (list, tuple) and isinstance(part, int):
            below += _alternatives(arguments[0])
    if below:
        return below
    return [alternative for alternative in here if _tag(alternative) == part] or here


def _alternatives(annotation: Any) -> list[Any]:
    """The types that an annotation allows, unions and `Annotated` taken apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for argument in typing.get_args(annotation) for each in _alternatives(argument)]
    return [annotation]


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if isinstance(annotation, type) and is_dataclass(annotation):
        return {field.name: field.type for field in dataclass_fields(annotation)}
    return {}


def _tag(annotation: Any) -> Any:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and "kind" in annotation.model_fields
    ):
        return annotation.model_fields["kind"].default
    return getattr(annotation, "kind", None)
