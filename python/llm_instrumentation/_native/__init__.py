"""Calls libstrap.so through ctypes: signatures, errors, Arrow import. It does not import torch.

``strap.h`` defines the interface. The names here are those of ``strap.h`` without the prefix.
"""

from .hooks import ForwardHooks, emission, emit_to, view_function
from .library import DTYPE_CODES, DTYPE_SIZES, codec_code, library_version
from .operators import BLOCK_ROWS, NativeForm, Operators
from .payload import decode, encode
from .reader import Reader, ReaderInfo, capture_id_of
from .rows import exchange_rows
from .session import Alarm, Conversion, Layout, Session, SessionStats

__all__ = [
    "BLOCK_ROWS",
    "DTYPE_CODES",
    "DTYPE_SIZES",
    "Alarm",
    "Conversion",
    "ForwardHooks",
    "Layout",
    "NativeForm",
    "Operators",
    "Reader",
    "ReaderInfo",
    "Session",
    "SessionStats",
    "capture_id_of",
    "codec_code",
    "decode",
    "emission",
    "emit_to",
    "encode",
    "exchange_rows",
    "library_version",
    "view_function",
]
