"""The files of others as calls: each function reads one format, one tensor at a time."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._extras import extra
from ..._parsing import parsing
from ...errors import CorruptError, InvalidArgumentError, NotFoundError, UnsupportedError
from ..reader import ActivationReader

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "ImportedCall", "ImportedTokens", "Options", "files_of"]

_LAYER_NAMES = "layers.{layer}"
_IDS, _MASK = "input_ids", "attention_mask"  # the keys of dicts that are no layers
_HIDDEN, _TOKENS = "hidden_states", "token_ids"
_MOST_SHARED = 100  # the bytes of all tensors of a file, for each byte of the file
_MOST_OF_NOTHING = 1 << 20  # the product of the dimensions that are not 0, if one is 0
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins


class Options(NamedTuple):
    """What the caller says of the files; None: nothing.

    Attributes:
        layer_names: names of the layers that the files number.
        widths: values of a token, by name or pattern.
        dtypes: stored types, by name or pattern.
    """

    layer_names: str | Sequence[str] | None
    widths: Mapping[str, int] | None
    dtypes: Mapping[str, Any] | None


class ImportedTokens(NamedTuple):
    """The tokens of a call.

    Attributes:
        rows: texts of its batch.
        length: tokens of each row.
        ids: int64 [rows, length]; None: unknown.
        mask: bool [rows, length], False for padding; None: there is no padding.
        held: the call continues the sequences of the call before it, which have so many tokens;
            None: it begins new ones.
    """

    rows: int
    length: int
    ids: npt.NDArray[np.int64] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    held: int | None = None


class ImportedCall(NamedTuple):
    """One call of a model, as a file has it.

    Attributes:
        source: the file, for messages.
        name: of its texts; a batch adds the row.
        tensors: the layers and their tensors, each read when it is asked for.
        tokens: its tokens; None: the file does not say how they lie in the tensors.
        done: the share of the file that is read after this call, up to 1.
        token: tokens that were recorded before the call; -1: unknown.
    """

    source: Path
    name: str
    tensors: Iterable[tuple[str, torch.Tensor]]
    tokens: ImportedTokens | None
    done: float
    token: int = -1


def files_of(source: Path, format: str) -> list[Path]:  # noqa: A002 - the word of the command
    """The files of a source: itself, or those of a folder, by name.

    Raises:
        NotFoundError: there is no such source.
        InvalidArgumentError: the folder has no file of the format.
    """
    if not source.exists():
        raise NotFoundError(f"{source}: no such file or folder")
    if not source.is_dir():
        return [source]
    suffixes = _SUFFIXES[format]
    found = sorted(path for path in source.iterdir() if path.suffix in suffixes and path.is_file())
    if not found:
        raise InvalidArgumentError(f"{source} has no file with the suffix {' or '.join(suffixes)}")
    return found


# ---- vLLM -----------------------------------------------------------------------------------


def _vllm(path: Path, options: Options) -> Iterator[ImportedCall]:
    """A file that vLLM wrote for a request: the states [token, layer, width] and its tokens."""
    with extra("export", "An import of safetensors"):
        from safetensors import safe_open
    with parsing(path, "is no safetensors file, or a part of it"):
        file: Any = safe_open(path, "pt")
    with file:
        if missing := {_HIDDEN, _TOKENS} - set(file.keys()):
            raise InvalidArgumentError(
                f"{path} has no {' and no '.join(sorted(missing))}, it has "
                f"{', '.join(sorted(file.keys())) or 'nothing'}"
            )
        with parsing(path):
            states, ids = file.get_slice(_HIDDEN), file.get_tensor(_TOKENS)
            shape = states.get_shape()
        if len(shape) != 3 or _claims_much(shape):
            raise InvalidArgumentError(
                f"{path}: {_HIDDEN} has the shape {shape}, not [tokens, layers, width]"
            )
        length, layers, _ = shape
        if list(ids.shape) != [length]:
            raise InvalidArgumentError(
                f"{path}: {_TOKENS} has the shape {list(ids.shape)}, and {_HIDDEN} has {length} "
                "tokens"
            )
        names = _names(path, layers, options.layer_names or _LAYER_NAMES)
        tensors = _slices(path, states, names)
        tokens = ImportedTokens(1, length, _integers(path, _TOKENS, ids)[None])
        yield ImportedCall(path, path.stem, tensors, tokens, 1.0)


def _slices(path: Path, states: Any, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, name in enumerate(names):
        with parsing(path):
            tensor = states[:, number][None]
        yield name, tensor


def _names(path: Path, layers: int, given: str | Sequence[str]) -> list[str]:
    """The name of each layer: a pattern with {layer}, or the names themselves."""
    if isinstance(given, str):
        if layers > 1 and "{layer}" not in given:
            raise InvalidArgumentError(
                f"layer name {given!r}: {path} has {layers} layers, so it needs {{layer}}"
            )
        return [given.replace("{layer}", str(number)) for number in range(layers)]
    if len(given) != layers:
        raise InvalidArgumentError(
            f"{path} has {layers} layers, and there are {len(given)} names: {', '.join(given)}"
        )
    return list(given)


# ---- torch.save -----------------------------------------------------------------------------


def _torch(path: Path, options: Options) -> Iterator[ImportedCall]:
    """A file of torch.save: a dict of tensors by layer, or a list of such dicts."""
    loaded = _loaded(path)
    calls = loaded if isinstance(loaded, (list, tuple)) else [loaded]
    held = 0
    for number, call in enumerate(calls):
        at = f"[{number}]" if calls is loaded else ""
        made = _dict_call(path, at, call, (number + 1) / len(calls))
        held += sum(tensor.nbytes for tensor in call.values())
        if held > _MOST_SHARED * path.stat().st_size:
            raise UnsupportedError(
                f"{path} is much smaller than its tensors, which share their memory: save a "
                "clone() of each"
            )
        yield made


def _loaded(path: Path) -> Any:
    import torch

    with open(path, "rb") as file:
        begins_as_zip = file.read(len(_ZIP)) == _ZIP
    with parsing(path):
        whole_zip = zipfile.is_zipfile(path)
    if begins_as_zip and not whole_zip:
        raise CorruptError(f"{path} is cut off: the end of its archive is missing")
    with parsing(path, "is cut off or damaged, or no file of torch.save"):
        try:
            # A pickle runs code of its author when it is loaded. With weights_only it is tensors
            # alone. Only the archives that torch has written since 1.6 can be mapped into memory.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=whole_zip)
        except pickle.UnpicklingError as error:
            raise UnsupportedError(
                f"{path} is no file of torch.save, or holds more than tensors in dicts and lists"
                f"{_reason(error)}. Other objects would run code while they are loaded, so "
                "they are refused. If you trust the file, load it with weights_only=False, and "
                "save the tensors in a dict by layer"
            ) from error


def _reason(error: Exception) -> str:
    """What a long message of torch.load says of the object, behind a colon; "" if nothing."""
    _, _, text = str(error).partition("WeightsUnpickler error: ")
    first = text.split("\n")[0].split(". ")[0].strip().rstrip(".")
    return f": {first}" if first else ""


def _dict_call(path: Path, at: str, call: Any, done: float) -> ImportedCall:
    import torch

    where = f"{path}{at and ' ' + at}"
    if not isinstance(call, Mapping):
        raise InvalidArgumentError(f"{where}: {_a(call)}, not a dict of tensors by layer")
    for key, value in call.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f"{where}: the key {key!r} is {_a(key)}, not a name")
        if not isinstance(value, torch.Tensor):
            raise InvalidArgumentError(f"{where}: {key!r} is {_a(value)}, not a tensor")
        if value.layout != torch.strided or value.device.type != "cpu":
            raise UnsupportedError(
                f"{where}: {key!r} is a {value.layout} tensor on {value.device}: save its "
                "to_dense(), on the CPU"
            )
        if value.nbytes > value.untyped_storage().nbytes():
            raise UnsupportedError(
                f"{where}: {key!r} has {value.nbytes} bytes and the file fewer of it, as after "
                "expand(): save its clone()"
            )
        if _claims_much(value.shape):
            raise InvalidArgumentError(
                f"{where}: {key!r} has no values: its shape is {list(value.shape)}"
            )
    layers = {key: value for key, value in call.items() if key not in (_IDS, _MASK)}
    if not layers:
        raise InvalidArgumentError(f"{where}: no layer, only {', '.join(call) or 'an empty dict'}")
    first, size = next(iter(layers)), (0, 0)
    for name, tensor in layers.items():
        if tensor.ndim not in (2, 3):
            raise InvalidArgumentError(
                f"{where}: {name!r} has the shape {list(tensor.shape)}, not [batch, tokens, width] "
                "or [tokens, width]"
            )
        rows, length = (1, tensor.shape[0]) if tensor.ndim == 2 else tensor.shape[:2]
        if name == first:
            size = rows, length
        elif size != (rows, length):
            raise InvalidArgumentError(
                f"{where}: {name!r} has {rows} rows of {length} tokens, and {first!r} has "
                f"{size[0]} of {size[1]}"
            )
    ids, mask = (_of_tokens(where, key, call.get(key), size) for key in (_IDS, _MASK))
    if mask is not None and (mask < 0).any():
        raise InvalidArgumentError(
            f"{where}: {_MASK!r} has {mask.min()}, not 1 for each token and 0 for padding"
        )
    tokens = ImportedTokens(*size, ids, None if mask is None else mask != 0)
    # Rows of a layer need one number of dimensions in all texts.
    tensors = ((name, one if one.ndim == 3 else one[None]) for name, one in layers.items())
    return ImportedCall(path, path.stem + at, tensors, tokens, done)


def _of_tokens(
    where: str, key: str, tensor: torch.Tensor | None, size: tuple[int, int]
) -> npt.NDArray[np.int64] | None:
    """The ids or the mask of a dict, [rows, tokens]."""
    if tensor is None:
        return None
    shape = tuple(tensor.shape)
    if shape != size and (1, *shape) != size:
        raise InvalidArgumentError(
            f"{where}: {key!r} has the shape {list(shape)}, and the layers have {size[0]} rows of "
            f"{size[1]} tokens"
        )
    return _integers(where, key, tensor).reshape(size)


def _integers(where: object, key: str, tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    if tensor.is_floating_point() or tensor.is_complex():
        raise InvalidArgumentError(f"{where}: {key!r} has the type {tensor.dtype}, not integers")
    found: npt.NDArray[np.int64] = tensor.numpy().astype(np.int64)
    return found


def _claims_much(shape: Sequence[int]) -> bool:
    """Whether a shape without values claims many rows, tokens or layers."""
    return 0 in shape and math.prod(filter(None, shape)) > _MOST_OF_NOTHING


def _a(value: object) -> str:
    return f"of the type {type(value).__name__}"


# ---- streams of 1.3.1 -----------------------------------------------------------------------


def _stream(path: Path, options: Options) -> Iterator[ImportedCall]:
    """A stream of 1.3.1: the n-th packet of each layer becomes that of step n."""
    with ActivationReader(path, warn=False, dtypes=options.dtypes) as reader:
        if reader.problem:
            raise CorruptError(
                f"{path}: {reader.problem}. strap salvage copies what is intact to a new stream"
            )
        if any(activation.shape is not None for activation in reader):
            raise InvalidArgumentError(
                f"{path} has an index with the shapes of its tensors: it needs no import"
            )
        if not reader.layers:
            raise InvalidArgumentError(f"{path} has no packets")
        widths: dict[str, int] = {}
        for pattern, width in (options.widths or {}).items():
            if width < 1:
                raise InvalidArgumentError(
                    f"widths: {pattern!r} has {width}, give a number above 0"
                )
            widths |= dict.fromkeys(reader._fitting(pattern), width)
        tokens = (reader.token_metadata or {}).get("tokens", [])
        steps = {layer: len(reader[layer]) for layer in reader.layers}
        known = set(steps.values()) == {len(tokens)}
        lengths = _lengths(path, reader, widths)
        generated = _generation(lengths, tokens) if known else None
        count = max(steps.values())
        for step in range(count):
            layers = [layer for layer in reader.layers if step < steps[layer]]
            yield ImportedCall(
                path,
                path.name.removesuffix(".stream"),
                _packets(reader, layers, widths, step),
                generated[step] if generated else None,
                (step + 1) / count,
                step if known else -1,
            )


def _lengths(path: Path, reader: ActivationReader, widths: Mapping[str, int]) -> list[list[int]]:
    """The tokens of each packet, for each layer whose width is known."""
    found = []
    for layer, width in widths.items():
        counts = []
        for number, activation in enumerate(reader[layer]):
            values = math.prod(reader._snapshot.form(activation._row, True, None).shape)
            if values % width:
                raise InvalidArgumentError(
                    f"{path}: packet {number} of {layer!r} has {values} values, which is no "
                    f"multiple of its width {width}"
                )
            counts.append(values // width)
        found.append(counts)
    return found


def _generation(lengths: list[list[int]], tokens: Sequence[Any]) -> list[ImportedTokens] | None:
    """The calls of a generation: a prompt, and then each token that was generated but the last.

    None: the packets are not those of one generation.
    """
    if not lengths or any(counts != lengths[0] for counts in lengths):
        return None
    prompt, *others = lengths[0]
    ids = [token.get("token_id") if isinstance(token, dict) else None for token in tokens]
    if prompt < 1 or set(others) - {1} or not all(isinstance(number, int) for number in ids):
        return None
    return [
        ImportedTokens(1, prompt),
        *(
            ImportedTokens(1, 1, np.array([[number]], np.int64), held=prompt + at)
            for at, number in enumerate(ids[:-1])
        ),
    ]


def _packets(
    reader: ActivationReader, layers: Iterable[str], widths: Mapping[str, int], step: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in layers:
        values = reader[layer][step].to_torch().flatten()
        yield layer, values.reshape(-1, widths[layer]) if layer in widths else values


# ---------------------------------------------------------------------------------------------

#: The functions that read each format, and the options that each takes.
FORMATS: dict[str, tuple[Callable[[Path, Options], Iterator[ImportedCall]], frozenset[str]]] = {
    "vllm": (_vllm, frozenset({"layer_names"})),
    "torch": (_torch, frozenset()),
    "stream-1.3.1": (_stream, frozenset({"widths", "dtypes"})),
}
_SUFFIXES = {
    "vllm": (".safetensors",),
    "torch": (".pt", ".pth"),
    "stream-1.3.1": (".stream",),
}
