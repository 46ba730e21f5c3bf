"""Writes docs/API.md: each public name, with the first sentence of its docstring.

    python scripts/api_page.py [--check]

The headings of modules in the page say which modules are listed, and in which order. The script
writes what stands below each of them, from the module's ``__all__``, and what stands below the
heading of the C interface, from c_include/strap.h. The other sections are written by hand and stay
as they are. With --check it writes nothing, and exits with 1 if the page is not what it would
write. It imports the modules, so it needs the packages of all extras.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
COMMENTS = ROOT / "scripts" / "griffe_comments.py"
SOURCES = ROOT / "python"
PAGE = ROOT / "docs" / "API.md"
HEADER = ROOT / "c_include" / "strap.h"
PACKAGE = "llm_instrumentation"

# Functions and subscripts give objects of these classes; nobody else constructs them.
GIVEN = {
    "ActivationRows", "ActivationView", "Applied", "ParsedTrace", "DecoderGraph", "RemoteRun",
    "Neighbours", "Rows", "SAEFeatures", "TopContexts",
}  # fmt: skip

_SECTION = re.compile(r"^## .*$", re.MULTILINE)
_MODULE = re.compile(rf"^## `({PACKAGE}[\w.]*)`$")
_C = "## C: strap.h"
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?\.?([\w.]+)`")
_ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>")


def main() -> int:
    written = PAGE.read_text(encoding="utf-8")
    made = page(written)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    differs = difflib.unified_diff(
        written.splitlines(), made.splitlines(), "docs/API.md", "docstrings", lineterm="", n=0
    )
    lines = list(differs)
    if lines:
        print(*lines, "run: python scripts/api_page.py", sep="\n")
    return 1 if lines else 0


def page(written: str) -> str:
    """The page: the parts that are written by hand as they are, the others anew."""
    head, *sections = split(written)
    modules = [found[1] for section in sections if (found := _MODULE.match(heading(section)))]
    homes = Homes(modules)
    made = [head]
    for section in sections:
        found = _MODULE.match(heading(section))
        if found:
            lines = [heading(section), "", *module_lines(found[1], homes)]
            made.append("\n".join(lines) + "\n\n")
        elif heading(section) == _C:
            made.append(c_section(section))
        else:
            made.append(section)
    return "".join(made).rstrip("\n") + "\n"


def split(text: str) -> list[str]:
    starts = [0, *(found.start() for found in _SECTION.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(starts)]


def heading(section: str) -> str:
    return section.partition("\n")[0]


# ---- Python -------------------------------------------------------------------


class Homes:
    """The module that describes each public object, among the modules of the page.

    That is the module that defines the object. If the page does not list that module, it is the
    innermost one that exports the object.
    """

    def __init__(self, modules: list[str]) -> None:
        self._homes: dict[tuple[str, int], str] = {}
        self.classes: set[type] = set()
        for name in sorted(modules, key=lambda module: module.count("."), reverse=True):
            module = importlib.import_module(name)
            for public in module.__all__:
                found = getattr(module, public)
                defined = getattr(found, "__module__", None)
                home = defined if defined in modules and is_object(found) else name
                self._homes.setdefault((public, id(found)), home)
                if inspect.isclass(found):
                    self.classes.add(found)

    def of(self, public: str, found: Any) -> str:
        return self._homes[public, id(found)]


def is_object(found: Any) -> bool:
    """Whether Python notes the module that defines it."""
    return inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found))


def module_lines(name: str, homes: Homes) -> Iterator[str]:
    module = importlib.import_module(name)
    described = describing(module)
    path = Path(described.__file__ or "").relative_to(ROOT).as_posix()
    yield f"{first_sentence(described.__doc__)} [Docstrings](../{path})"
    own: list[str] = []
    others: dict[str, list[str]] = {}
    for public in module.__all__:
        found = getattr(module, public)
        home = homes.of(public, found)
        if home == name:
            own += public_lines(module, public, found, homes.classes)
        else:
            others.setdefault(home, []).append(f"`{public}`")
    if own:
        yield ""
        yield from own
    if others:
        yield ""
        for home, names in others.items():
            anchor = home.replace(".", "").lower()
            yield f"- From [`{home.removeprefix(PACKAGE + '.')}`](#{anchor}): {', '.join(names)}."


def describing(module: ModuleType) -> ModuleType:
    """The module with the docstrings: of a module of 1.3.1 the one in `compat`."""
    compat = f"{PACKAGE}.compat.{module.__name__.rpartition('.')[2]}"
    found = [getattr(module, public) for public in module.__all__]
    defined = {getattr(public, "__module__", None) for public in found}
    return importlib.import_module(compat) if compat in defined else module


def public_lines(module: ModuleType, public: str, found: Any, listed: set[type]) -> Iterator[str]:
    """The line of a class, function or constant, and those of a class's members."""
    if inspect.isclass(found) and public != found.__name__ in module.__all__:
        yield line(public, f"another name of `{found.__name__}`.")
    elif inspect.isclass(found):
        yield line(f"{public}{constructor(found)}", class_text(found))
        yield from member_lines(public, found, listed)
    elif inspect.isfunction(inspect.unwrap(found)):
        yield line(f"{public}{signature(found)}", first_sentence(found.__doc__), found)
    else:
        yield line(public, constant_text(module, public, found))


def line(code: str, text: str, function: Any = None) -> str:
    if inspect.iscoroutinefunction(function):
        code = f"async {code}"
    return f"- `{code}`" + (f": {text}" if text else "")


def class_text(cls: type) -> str:
    bases = [base.__name__ for base in cls.__bases__ if issubclass(base, BaseException)]
    text = first_sentence(own_doc(cls))
    if issubclass(cls, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in cls)
        return f"{text} Members: {members}."
    article = "An" if bases and bases[0][0] in "AEIOU" else "A"
    return f"{text} {article} `{'` and `'.join(bases)}`." if bases else text


def own_doc(cls: type) -> str | None:
    """The docstring of a class, without that of a base and that which dataclasses make."""
    text = cls.__dict__.get("__doc__")
    return None if text and text.startswith(f"{cls.__name__}(") else text


def constructor(cls: type) -> str:
    """The arguments of a class, if its users construct it."""
    special = (enum.Enum, BaseException)
    if issubclass(cls, special) or getattr(cls, "_is_protocol", False) or inspect.isabstract(cls):
        return ""
    if cls.__name__ in GIVEN:
        return ""
    try:
        found = inspect.signature(cls)
    except (TypeError, ValueError):
        return ""
    parameters = found.parameters.values()
    if any(p.name.startswith("_") and p.default is p.empty for p in parameters):
        return ""  # only the package constructs it
    return written(found)


def member_lines(public: str, cls: type, listed: set[type]) -> Iterator[str]:
    """The lines of the attributes, properties and methods of a class.

    A member that a listed base describes, and the class does not, has none.
    """
    of_bases = {name for base in cls.__mro__[1:] if base in listed for name in dir(base)}
    described = attributes(cls)
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    fields |= set(getattr(cls, "_fields", ()))
    for name, text in described.items():
        if name not in fields and not callable(inspect.getattr_static(cls, name, None)):
            yield line(f"{public}.{name}", text)
    for name, function in functions(cls):
        if name not in described and name not in fields:
            if name in of_bases and not (name in vars(cls) and function.__doc__):
                continue
            static = inspect.getattr_static(cls, name)
            is_data = isinstance(static, property | functools.cached_property)
            code = f"{public}.{name}" + ("" if is_data else bound_signature(cls, name, function))
            yield line(code, first_sentence(inherited_doc(cls, name, function)), function)


def inherited_doc(cls: type, name: str, function: Any) -> str | None:
    """The docstring of a member, or of the one that it overrides."""
    overridden = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    texts = [function.__doc__, *(getattr(member, "__doc__", None) for member in overridden)]
    return next(filter(None, texts), None)


def functions(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    """The public methods and properties of a class, in the order of their sources.

    Methods of bases outside of the package are left out.
    """
    found = []
    for depth, base in enumerate(cls.__mro__):
        if not base.__module__.startswith(PACKAGE):
            continue
        for place, (name, static) in enumerate(vars(base).items()):
            if not name.startswith("_") and name not in {other for *_, other, _ in found}:
                function = getattr(static, "__func__", static)
                function = getattr(function, "fget", None) or getattr(function, "func", function)
                function = inspect.unwrap(function) if callable(function) else function
                if inspect.isfunction(function) or isinstance(function, type):
                    found.append((-depth, place, name, function))
    return [(name, function) for *_, name, function in sorted(found, key=lambda f: f[:2])]


def attributes(cls: type) -> dict[str, str]:
    """The first sentences of the section "Attributes" of a class's docstring, by name."""
    found = re.search(
        r"^Attributes:\n((?:[ \t]+.*\n|\n)+)", inspect.cleandoc(own_doc(cls) or "") + "\n", re.M
    )
    entries = re.findall(r"^    (\w+): (.*\n(?:     +.*\n|\n)*)", found[1] if found else "", re.M)
    return {name: sentence_of_entry(text) for name, text in entries}


def sentence_of_entry(text: str) -> str:
    text = first_sentence(text)
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+\b(?![._(])", text) else text


def signature(function: Any) -> str:
    return written(inspect.signature(function))


def bound_signature(cls: type, name: str, function: Any) -> str:
    """The signature of a method as its callers see it, without self."""
    static = inspect.getattr_static(cls, name)
    if isinstance(static, staticmethod | type):
        return signature(function)
    found = inspect.signature(function)
    return written(found.replace(parameters=list(found.parameters.values())[1:]))


def written(found: inspect.Signature) -> str:
    """A signature without annotations."""
    parameters = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else Shown(p.default))
        for p in found.parameters.values()
        if not p.name.startswith("_")
    ]
    short = found.replace(parameters=parameters, return_annotation=found.empty)
    return re.sub(r"\s+", " ", str(short))


class Shown:
    """A default value, with a text that is the same in every run."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if inspect.isclass(value) or inspect.isfunction(value):
            return value.__name__
        text = repr(value)
        return "..." if _ADDRESS.search(text) or text == "<factory>" else text.replace("|", r"\|")


def constant_text(module: ModuleType, public: str, found: Any) -> str:
    """The description of a constant, and the value of a short one, or the values of a Literal."""
    texts = [text] if (text := first_sentence(constant_doc(module.__name__, public))) else []
    is_plain = isinstance(found, str | bytes | int | float | tuple) and len(repr(found)) < 80
    if is_plain and public != "__version__" and not (isinstance(found, str) and " | " in found):
        texts.append(f"`{found!r}`.")
    if typing.get_origin(found) is typing.Literal:
        texts.append(", ".join(f'`"{value}"`' for value in typing.get_args(found)) + ".")
    return " ".join(texts)


def constant_doc(module: str, public: str) -> str | None:
    found = package()[module.partition(".")[2]] if "." in module else package()
    member = found.members.get(public)
    while member is not None and member.is_alias:
        member = package()[member.target_path.partition(".")[2]]  # type: ignore[union-attr]
    return member.docstring.value if member is not None and member.docstring else None


@functools.cache
def package() -> Any:
    """The sources of the package; Python keeps no docstrings of constants."""
    extensions = griffe.load_extensions(COMMENTS)
    return griffe.load(
        PACKAGE, search_paths=[SOURCES], allow_inspection=False, extensions=extensions
    )


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring as one line of Markdown; "" without a docstring."""
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(text or ""), maxsplit=1)[0]
    paragraph = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", paragraph)
    paragraph = " ".join(paragraph.split()).replace("``", "`")
    sentence = re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.) ", paragraph, maxsplit=1)[0]
    sentence = re.sub(r"\s*:+$", ".", sentence)
    code = re.split(r"(`[^`]*`)", sentence)
    sentence = "".join(t if t.startswith("`") else re.sub(r"([*<])", r"\\\1", t) for t in code)
    return sentence if not sentence or sentence.endswith((".", "!", "?")) else f"{sentence}."


# ---- C ------------------------------------------------------------------------


def c_section(section: str) -> str:
    """The heading and the text by hand, and a line for each function of the header."""
    by_hand = section.partition("\n### ")[0].rstrip("\n")
    return "\n".join([by_hand, "", *c_lines(HEADER.read_text(encoding="utf-8"))]) + "\n\n"


def c_lines(header: str) -> Iterator[str]:
    """The functions, below the headings of the header's parts."""
    part = ""
    token = re.compile(
        r"/\* -+ (?P<part>[^\n]+?) -+ \*/"
        r"|/\*(?P<comment>.*?)\*/"
        r"|^[\w ]+?\**\b(?P<name>strap_\w+)\([^;{]*\);",
        re.DOTALL | re.MULTILINE,
    )
    comment = heading = ""
    for found in token.finditer(header):
        if found["part"]:
            heading, comment = found["part"], ""
        elif found["comment"] is not None:
            comment = found["comment"]
        else:
            if heading != part:
                yield from ([""] if part else [])
                part = heading
                yield from (f"### {part[0].upper()}{part[1:]}", "")
            text = re.sub(r"^ ?\*", "", comment, flags=re.MULTILINE)
            yield line(found["name"], first_sentence(text))


if __name__ == "__main__":
    sys.exit(main())
