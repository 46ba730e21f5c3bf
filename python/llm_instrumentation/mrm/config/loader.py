"""Reads an experiment file, and explains each mistake in it on a line of its own."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._extras import extra

with extra("mrm", "An experiment file"):
    import yaml
    from pydantic import BaseModel, ValidationError

from ...errors import InvalidArgumentError
from .schema import ExperimentConfig

__all__ = ["ConfigError", "load_experiment", "read_yaml"]


class ConfigError(InvalidArgumentError):
    """An experiment file, or another YAML file, is not valid.

    Attributes:
        problems: a line per mistake: the dotted key, its value, and the allowed values.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


def load_experiment(config_path: str | os.PathLike[str]) -> ExperimentConfig:
    """Reads and checks an experiment file.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: (a ValueError) the file is no YAML, or no valid experiment.
    """
    raw = read_yaml(config_path)
    source = os.fspath(config_path)
    if raw is None:
        raise ConfigError(source, ["empty; an experiment needs at least experiment and models"])
    if not isinstance(raw, dict):
        raise ConfigError(source, [f"{_shown(raw)} is no mapping; {_keys(ExperimentConfig)}"])
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(source, explain(error, ExperimentConfig)) from None


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file. A key that occurs twice in a mapping is an error.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: (a ValueError) the path is a folder, or the file is no YAML or no UTF-8; the
            message names the line, or the byte.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.is_dir():
        raise ConfigError(str(path), ["is a folder; give a YAML file"])
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"byte {error.start} is no UTF-8 text"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(str(path), [f"{place}{error.problem or error.context}"]) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            str(path), [f"character {error.position} is {chr(error.character)!r}; this is no text"]
        ) from None
    except RecursionError:
        raise ConfigError(str(path), ["lists or mappings lie too deep in each other"]) from None


class _Loader(yaml.SafeLoader):
    """A safe YAML loader with two further errors, each with its line.

    A key must not occur twice in a mapping: YAML itself would use the second value. A value must be
    valid for the type that its form or its tag says, as in ``!!int x``.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{_shown(node.value)} is no {kind}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key.value!r} stands here and in line {seen[key.value]}; keep one",
                    key.start_mark,
                )
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each error of pydantic: the dotted key, its value, and the allowed values."""
    return [
        f"{_dotted(place)}: {_message(found, place, model)}"
        for found in error.errors()
        if (place := _place(found["loc"], model)) is not None
    ]


def _place(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[int | str, ...]:
    return loc or (model.__name__,)


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


_TYPES = {
    "int_type": "is no whole number",
    "int_from_float": "is no whole number",
    "float_type": "is no number",
    "finite_number": "is not finite",
    "string_type": "is no text; put it in quotes",
    "bool_type": "is neither true nor false",
    "list_type": "is no list",
}


def _message(found: Any, loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    shown = _shown(value)
    if kind == "extra_forbidden":
        section = _section(model, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), section.model_fields, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key; {hint}{_keys(section)}"
    if kind == "invalid_key":
        return f"the key is no text; {_keys(_section(model, loc[:-1]))}"
    if kind == "missing":
        return "missing"
    if kind in ("enum", "literal_error"):
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{shown} is none of {allowed}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{shown} is no mapping; {_keys(_section(model, loc))}"
    if kind in _TYPES:
        return f"{shown} {_TYPES[kind]}"
    if kind == "too_short":
        return "is empty; it needs at least one value"
    if kind == "string_too_short":
        return "is empty"
    if kind == "greater_than":
        return f"{shown} must be above {context['gt']}"
    if kind == "greater_than_equal":
        return f"{shown} must be at least {context['ge']}"
    if kind == "less_than_equal":
        return f"{shown} must be at most {context['le']}"
    if kind == "string_pattern_mismatch":
        return f"{shown} does not match {context['pattern']}"
    if kind == "value_error":
        return str(context["error"])
    return f"{shown}: {found['msg']}"


# The words of YAML for values that Python spells differently.
_YAML_WORDS = {None: "null", True: "true", False: "false"}


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _YAML_WORDS[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys(section: type[BaseModel]) -> str:
    return f"allowed are {', '.join(section.model_fields)}"


def _section(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the section at a place of the file."""
    for part in loc:
        if isinstance(part, str):
            model = next(iter(_models_in(model.model_fields[part].annotation)), model)
    return model


def _models_in(annotation: Any) -> typing.Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
