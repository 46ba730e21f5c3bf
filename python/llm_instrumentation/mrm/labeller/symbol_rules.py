"""Rules that give a row's region type by its symbol, file, phase and operation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..._extras import extra
from ..._parsing import parsing
from ...errors import InvalidArgumentError
from ..schema import OpType, RegionType

#: The region types that a rule may give.
RULE_TYPES = tuple(kind.value for kind in RegionType if kind is not RegionType.UNKNOWN)


@dataclass
class SymbolRule:
    """Gives ``region_type`` to the rows that meet all its conditions that are not None.

    Attributes:
        region_type: one of :data:`RULE_TYPES`.
        phase: the phase of the row.
        op_type: load or store.
        symbol_re: a regular expression that is searched for in the symbol, without regard to case.
        dso_re: the same for the file name.

    libstrap reads both patterns in RE2's syntax, which has no look-around and no back-references.

    Raises:
        InvalidArgumentError: the type, the operation or a pattern is not valid.
    """

    region_type: str
    phase: str | None = None
    op_type: str | None = None
    symbol_re: str | None = None
    dso_re: str | None = None
    _symbol: re.Pattern[str] | None = field(default=None, init=False, repr=False, compare=False)
    _dso: re.Pattern[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.region_type not in RULE_TYPES:
            raise InvalidArgumentError(
                f"region_type {self.region_type!r}: one of {', '.join(RULE_TYPES)}"
            )
        if self.op_type is not None and self.op_type not in [op.value for op in OpType]:
            raise InvalidArgumentError(f"op_type {self.op_type!r}: load, store or nothing")
        self._symbol = _compiled("symbol_re", self.symbol_re)
        self._dso = _compiled("dso_re", self.dso_re)

    def matches(self, symbol: str, dso: str, phase: str | None, op_type: str) -> bool:
        """Whether a row with these values matches."""
        return (
            (self.phase is None or phase == self.phase)
            and (self.op_type is None or op_type == self.op_type)
            and (self._symbol is None or self._symbol.search(symbol or "") is not None)
            and (self._dso is None or self._dso.search(dso or "") is not None)
        )

    def as_options(self) -> dict[str, str]:
        """The rule in the form that libstrap takes."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and not name.startswith("_")
        }


def _compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InvalidArgumentError(f"{name} {pattern!r}: {error}") from error


#: Rules for llama.cpp and vLLM, the same as libstrap's DefaultRules. The first match applies.
DEFAULT_RULES: list[SymbolRule] = [
    SymbolRule("weight", phase="weight_load", op_type="store"),
    SymbolRule("weight", phase="weight_load"),
    SymbolRule("kv_cache", symbol_re=r"kv_cache|kv_update|kv_read|kv_write|attn_cache|llama_kv"),
    SymbolRule("weight", symbol_re=r"ggml_vec_dot|ggml_mul_mat|ggml_q[48]_k|ggml_q[48]\b"),
    SymbolRule(
        "weight",
        symbol_re=r"ggml_init|ggml_new_tensor|ggml_set_|model_load|load_model|load_weight",
    ),
    SymbolRule(
        "activation",
        symbol_re=r"ggml_compute|ggml_add|ggml_silu|ggml_norm|ggml_rms_norm|ggml_rope",
    ),
    SymbolRule("runtime", symbol_re=r"^(malloc|calloc|realloc|free|mmap|munmap|brk)$"),
]


def classify_symbol(
    symbol: str,
    dso: str,
    phase: str | None,
    op_type: str,
    rules: Sequence[SymbolRule] | None = None,
) -> str | None:
    """The region type of the first rule that matches, or None. By default ``DEFAULT_RULES``."""
    for rule in DEFAULT_RULES if rules is None else rules:
        if rule.matches(symbol, dso, phase, op_type):
            return rule.region_type
    return None


def load_rules(path: str | os.PathLike[str]) -> list[SymbolRule]:
    """Reads rules from a YAML file: a list of rules, or a mapping with the list under ``rules``.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidArgumentError: the file is no YAML or has no list of rules, or a rule is not valid;
            the message names the rule and the key.
    """
    with extra("mrm", "A file of rules"):
        import yaml

    file = Path(path)
    with parsing(file, "is no YAML", kind=InvalidArgumentError):
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    if isinstance(given, dict):
        if unknown := sorted(map(str, given.keys() - {"rules"})):
            raise InvalidArgumentError(f"{file}: unknown keys {', '.join(unknown)}; give rules")
        given = given.get("rules")
    if not isinstance(given, list) or not given:
        raise InvalidArgumentError(f"{file}: no list of rules")
    return [_rule(f"{file}: rules[{number}]", rule) for number, rule in enumerate(given)]


def _rule(where: str, given: Any) -> SymbolRule:
    names = [f.name for f in fields(SymbolRule) if f.init]
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"{where}: {given!r} is no mapping")
    if unknown := sorted(map(str, given.keys() - set(names))):
        raise InvalidArgumentError(
            f"{where}: unknown keys {', '.join(unknown)}; a rule has {', '.join(names)}"
        )
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(f"{where}.{name}: {value!r} is no text")
    if not given.get("region_type"):
        raise InvalidArgumentError(f"{where}: no region_type")
    try:
        return SymbolRule(**given)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error
