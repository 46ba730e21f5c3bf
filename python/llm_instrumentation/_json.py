"""JSON that others may have written."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["load_json"]


def load_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: the text is no JSON, or is nested so deep that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
