"""The prompts that a model reads in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._json import load_json
from ...errors import InvalidArgumentError
from .loader import read_yaml
from .schema import PromptsConfig

__all__ = ["BUILTIN", "Prompt", "load_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt and its category."""

    text: str
    category: str = ""


BUILTIN = (
    Prompt("Name the seasons of a year in the order in which they come, and say why.", "facts"),
    Prompt(
        "A farmer has seventeen sheep. All but nine run away. How many are left? Think step by "
        "step before you answer.",
        "reasoning",
    ),
    Prompt("Write a function that reverses a linked list in place, and explain each line.", "code"),
    Prompt(
        "Put in one sentence: a computer's memory is a hierarchy, small and fast near the "
        "processor, large and slow far from it, and most programs live from finding what they "
        "need near by.",
        "summary",
    ),
    Prompt("Tell a short story about a lighthouse keeper who collects lost letters.", "story"),
)


def load_prompts(config: PromptsConfig | None = None) -> list[Prompt]:
    """The prompts that a config names, in their order; without a config the built-in ones.

    Raises:
        FileNotFoundError, IsADirectoryError: ``prompts.source`` names no file.
        InvalidArgumentError: (a ValueError) the file has another suffix or format, holds no
            prompts, or lacks one of the wanted categories.
    """
    config = config or PromptsConfig()
    if config.texts:
        found = [Prompt(text) for text in config.texts]
    elif config.source == "builtin":
        found = list(BUILTIN)
    else:
        found = list(_from_file(Path(config.source)))
    if not found:
        raise InvalidArgumentError(f"prompts.source: {config.source!r} holds no prompts")
    known = {prompt.category for prompt in found}
    for wanted in config.categories:
        if wanted not in known:
            names = ", ".join(sorted(name for name in known if name)) or "none"
            raise InvalidArgumentError(
                f"prompts.categories: {wanted!r} is none of the file's: {names}"
            )
    if config.categories:
        found = [prompt for prompt in found if prompt.category in config.categories]
    return found[: config.limit]


def _from_file(path: Path) -> Iterator[Prompt]:
    if not path.exists():
        raise FileNotFoundError(f"prompts.source: {str(path)!r} is not there")
    if path.is_dir():
        raise IsADirectoryError(f"prompts.source: {str(path)!r} is a folder; give a file")
    if path.suffix in (".yaml", ".yml"):
        yield from _from_tree(read_yaml(path), path)
    elif path.suffix == ".json":
        yield from _from_tree(_json(_text(path), str(path)), path)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(_text(path).splitlines(), 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield _from_object(_json(line, place), place)
    elif path.suffix == ".txt":
        yield from (Prompt(line.strip()) for line in _text(path).splitlines() if line.strip())
    else:
        raise InvalidArgumentError(
            f"prompts.source: {str(path)!r} is none of .txt, .jsonl, .json, .yaml, .yml"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"prompts.source: {path}: byte {error.start} is no UTF-8 text"
        ) from None


def _json(text: str, place: str) -> Any:
    try:
        return load_json(text)
    except ValueError as error:
        raise InvalidArgumentError(f"prompts.source: {place}: {error}") from None


def _from_tree(tree: Any, path: Path) -> Iterator[Prompt]:
    groups = tree.items() if isinstance(tree, dict) else [("", tree)]
    for category, items in groups:
        if not isinstance(items, list):
            raise InvalidArgumentError(
                f"prompts.source: {path}: {category or 'the file'} is no list of texts"
            )
        for item in items:
            if isinstance(item, str):
                yield Prompt(item, str(category))
            else:
                yield _from_object(item, str(path), str(category))


def _from_object(item: Any, place: str, category: str = "") -> Prompt:
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
        raise InvalidArgumentError(f"prompts.source: {place}: {item!r} has no text under 'prompt'")
    return Prompt(item["prompt"], str(item.get("category", category)))
