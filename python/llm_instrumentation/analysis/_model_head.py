"""The head of a language model: what it makes of the vectors of its last block, up to the logits.

It is the model's own code that runs, with other vectors in the place of those of its last block. So
norms, projections, biases, scales and soft caps are all there, wherever a model has them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.outputs import replace_tensor
from ..core.tensors.modules import adapter_advice, original_name
from ..errors import InvalidArgumentError, UnsupportedError

__all__ = ["VECTORS", "ModelHead", "evaluating", "unembedding_of"]

_ENTRY = re.compile(r"(?:[^.]*[^.\d][^.]*\.)*\d+")  # of a list that is in no other list
VECTORS = 64  # that go through the head together
_TEXTS, _LENGTH = 2, 7  # of the made-up texts that the head is checked on
_MASKED = 1e30  # logits of tokens that a model never predicts are below minus this
_WAY_OUT = "pass norm= and unembedding=, the modules that make logits of vectors"


class _BlockCall(NamedTuple):
    """A call of a block."""

    name: str
    module: nn.Module
    output: Any


class ModelHead:
    """The head of a model, found and checked with two forward passes of made-up tokens.

    The first is of two texts. The second is of single tokens, and in it all blocks but the last are
    skipped from then on. The vectors of the last block of the first run, put into the second, must
    make the logits of the first. So the logits depend on nothing else.

    Args:
        model: a language model.

    Attributes:
        blocks: the names of the modules of the list that the last block is in.
        matrices: the names of the modules of the head that have a matrix, in the order in which
            they run. One is the unembedding. Others change the directions of vectors before or
            behind it.

    Raises:
        InvalidArgumentError: (a ValueError) the model has no unembedding.
        UnsupportedError: (a TypeError) the model does not run on token ids alone, or its logits are
            not made of the vectors of one block alone.
    """

    def __init__(self, model: nn.Module) -> None:
        original = getattr(model, "_orig_mod", model)
        self._model: nn.Module = original
        self._kind = type(original).__name__
        known = _embedded(original)
        self._entries = {
            original_name(name): module
            for name, module in original.named_modules()
            if _ENTRY.fullmatch(original_name(name))
        }
        self._ids = _plain_ids(original, known)
        self._number = 0  # of the calls of blocks in a run
        with evaluating(original), torch.inference_mode():
            calls, logits = self._run(_TEXTS, _LENGTH)
            if logits.shape[-1] < known and _unembedding(original) is None:
                raise InvalidArgumentError(
                    f"{self._kind} returns {logits.shape[-1]} numbers for each token, which are no "
                    f"logits of its {known} tokens: {_WAY_OUT}"
                )
            self._calls, _ = self._run(VECTORS, 1)
            self._target = self._found(calls, logits)
        self.blocks = tuple(
            name for name in self._entries if _list_of(name) == _list_of(calls[self._target].name)
        )
        self._apart = _lists_apart(calls, _list_of(calls[self._target].name))

    def check_layer(self, layer: str) -> None:
        """
        Raises:
            UnsupportedError: the layer is in another part of the model, as an encoder.
        """
        for other in self._apart:
            if layer.startswith(other):
                raise UnsupportedError(
                    f"{layer!r} is in another part of {self._kind} than {self.blocks[-1]!r}, whose "
                    "vectors become logits: choose layers of that part"
                )

    def logits(self, vectors: Tensor) -> Tensor:
        """What the model would predict if these were the vectors of its last block.

        Args:
            vectors: [vectors, width].

        Returns:
            [vectors, vocabulary], in the type that the model returns.

        Raises:
            InvalidArgumentError: the vectors have another width.
        """
        with evaluating(self._model), torch.inference_mode():
            return self._of_all(vectors)

    @contextlib.contextmanager
    def _noting_matrices(self, found: dict[str, None]) -> Iterator[None]:
        """Notes the modules with a matrix that run behind the last block, in their order."""

        def seen(name: str, module: nn.Module, args: Any) -> None:
            if self._number > self._target:
                found[original_name(name)] = None

        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
                    handle = module.register_forward_pre_hook(functools.partial(seen, name))
                    hooks.callback(handle.remove)
            yield

    def _run(self, texts: int, length: int) -> tuple[list[_BlockCall], Tensor]:
        """The calls of the blocks in a run of the model, and its logits."""
        calls: list[_BlockCall] = []

        def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
            # The model may change what a block returned in place.
            calls.append(_BlockCall(name, module, _with(output, lambda tensor: tensor.clone())))

        with contextlib.ExitStack() as hooks:
            for name, module in self._entries.items():
                handle = module.register_forward_hook(functools.partial(keep, name))
                hooks.callback(handle.remove)
            logits = self._logits_of(texts, length)
        if not calls:
            raise UnsupportedError(
                f"{self._kind} runs no module of a list, so it has no blocks that are known: "
                f"{_WAY_OUT}{adapter_advice(self._model)}"
            )
        return calls, logits

    def _logits_of(self, texts: int, length: int) -> Tensor:
        try:
            output = self._model(**_arguments(self._model, self._ids[:texts, :length]))
        except _MismatchError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{self._kind} does not run on made-up token ids, so it cannot be checked what its "
                f"head is: {_WAY_OUT}{adapter_advice(self._model)}. {type(error).__name__}: {error}"
            ) from error
        for name in ("logits", "prediction_logits"):
            if isinstance(found := getattr(output, name, None), Tensor):
                break
        else:
            found = output[0] if isinstance(output, (tuple, list)) and output else output
            unembedding_of(self._model)
        if not isinstance(found, Tensor) or found.shape[:-1] != (texts, length):
            shape = list(found.shape) if isinstance(found, Tensor) else type(output).__name__
            raise UnsupportedError(
                f"{self._kind} returns {shape} for {texts} texts of {length} tokens, which are no "
                f"logits of each token: {_WAY_OUT}"
            )
        return found

    def _found(self, calls: list[_BlockCall], logits: Tensor) -> int:
        """The first of the calls, the last one of its list, whose vectors alone make the logits."""
        problems = []
        for number in _lasts(calls):
            name, vectors = calls[number].name, _rows(_first(calls[number].output))
            if vectors is None:
                problems.append(f"{name!r} returns no vector for each token")
                continue
            self._target = number
            matrices: dict[str, None] = {}
            try:
                with self._noting_matrices(matrices):
                    found = self._of_all(vectors)
            except _MismatchError as problem:
                problems.append(f"{name!r} {problem}")
                continue
            wrong = _share_that_differs(found, logits.flatten(0, 1))
            if not wrong:
                self.matrices = tuple(matrices)
                return number
            problems.append(f"from those of {name!r}, {wrong:.0%} of the logits differ")
        raise UnsupportedError(
            f"the logits of {self._kind} are not made of the vectors of one block alone "
            f"({'; '.join(problems)}): {_WAY_OUT}{adapter_advice(self._model)}"
        )

    def _of_all(self, vectors: Tensor) -> Tensor:
        return torch.cat([self._of_some(some) for some in torch.split(vectors, VECTORS)])

    def _of_some(self, vectors: Tensor) -> Tensor:
        """The logits of as many vectors as go through the head together."""
        if self._target >= len(self._calls):
            raise _MismatchError("is not always called")
        target = self._calls[self._target]
        place = _first(target.output)
        if place is None or place.numel() != VECTORS * place.shape[-1]:
            raise _MismatchError("returns no vector for a single token")
        if vectors.dim() != 2 or vectors.shape[1] != place.shape[-1]:
            raise InvalidArgumentError(
                f"the vectors have the shape {list(vectors.shape)}, and {target.name!r} returns "
                f"vectors of width {place.shape[-1]}"
            )
        filled = vectors.new_zeros(VECTORS, vectors.shape[1])
        filled[: len(vectors)] = vectors
        given = filled.to(place.device, place.dtype).reshape(place.shape)
        with self._skipping(given):
            logits = self._logits_of(VECTORS, 1)
        return logits[: len(vectors), 0]

    @contextlib.contextmanager
    def _skipping(self, given: Tensor) -> Iterator[None]:
        """Calls of blocks up to the last one return what they did, and that one given vectors."""
        self._number = 0

        def forward(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            at, self._number = self._number, self._number + 1
            if at > self._target:
                return own(*args, **kwargs)
            if self._calls[at].module is not module:
                raise _MismatchError("is not always called in the same order")
            output = self._calls[at].output
            return output if at < self._target else _with(output, lambda _: given.clone())

        with contextlib.ExitStack() as undo:
            for module in self._entries.values():
                # `accelerate` has its own forward there already.
                if "forward" in vars(module):
                    undo.callback(setattr, module, "forward", vars(module)["forward"])
                else:
                    undo.callback(delattr, module, "forward")
                module.forward = functools.partial(forward, module, module.forward)
            yield


class _MismatchError(Exception):
    """A block is not one whose vectors can be replaced; the message goes on behind its name."""


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode in the block, and every module back to its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _list_of(name: str) -> str:
    """The name of the list of a module, with a dot behind it."""
    return name.rpartition(".")[0] + "."


def _ranges(calls: list[_BlockCall]) -> dict[str, tuple[int, int]]:
    """The first and the last call of each list."""
    found: dict[str, tuple[int, int]] = {}
    for number, call in enumerate(calls):
        name = _list_of(call.name)
        found[name] = (found.get(name, (number,))[0], number)
    return found


def _lasts(calls: list[_BlockCall]) -> list[int]:
    """The last call of each list, in the order in which they may be those of the last block.

    The lists of an encoder come before those of a decoder. A block may have its parts in several
    lists, which are called in turn. Of these the last one comes first.
    """
    turns: list[list[int]] = []
    end = -1
    for first, last in sorted(_ranges(calls).values()):
        if first > end:
            turns.append([])
        turns[-1].append(last)
        end = max(end, last)
    return [last for turn in turns for last in sorted(turn, reverse=True)]


def _lists_apart(calls: list[_BlockCall], own: str) -> tuple[str, ...]:
    """The lists in other parts of the model that run before or behind a list, not in turn."""

    def part(name: str) -> str:
        return name.rstrip(".").rpartition(".")[0]

    ranges = _ranges(calls)
    begin, end = ranges[own]
    return tuple(
        name
        for name, (first, last) in ranges.items()
        if (last < begin or first > end) and part(name) != part(own)
    )


def _unembedding(model: nn.Module) -> nn.Module | None:
    found: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return found


def unembedding_of(model: nn.Module) -> nn.Module:
    """The module that makes logits of vectors.

    Raises:
        InvalidArgumentError: the model has none.
    """
    if (found := _unembedding(model)) is None:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no output embeddings: pass unembedding=, the module that "
            "makes logits of vectors"
        )
    return found


def _embedded(model: nn.Module) -> int:
    """How many tokens the model has embeddings for.

    Raises:
        InvalidArgumentError: it is not known.
    """
    with contextlib.suppress(NotImplementedError, AttributeError):
        weight = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return len(weight)
    weight = getattr(unembedding_of(model), "weight", None)
    return len(weight) if isinstance(weight, Tensor) else 0


def _plain_ids(model: nn.Module, known: int) -> Tensor:
    """Made-up token ids, none of which has a meaning of its own, as the place of an image has.

    Returns:
        int64, [64, 7], on the device of the model's first weight.

    Raises:
        UnsupportedError: it is not known which ids there are.
    """
    special: set[int] = set()

    def collect(values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif str(name).endswith(("token_id", "token_ids", "token_index", "_id")):
                several = value if isinstance(value, (list, tuple)) else [value]
                special.update(one for one in several if isinstance(one, int))

    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        collect(config.to_dict())
    plain = [number for number in range(known) if number not in special]
    if len(plain) < 2:
        raise UnsupportedError(
            f"it is not known which token ids {type(model).__name__} takes, so its head cannot be "
            f"checked: {_WAY_OUT}"
        )
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(plain), (VECTORS, _LENGTH), generator=generator)
    device = next((weight.device for weight in model.parameters()), None)
    return torch.tensor(plain)[places].to(device)


def _arguments(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    asked = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in asked.values())
    name = "input_ids" if "input_ids" in asked or takes_all else next(iter(asked), "input_ids")
    found: dict[str, Any] = {name: ids}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids
    if "use_cache" in asked:
        found["use_cache"] = False
    return found


def _with(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returned, with its first tensor changed: the one that captures call as it."""
    try:
        return replace_tensor(output, "", lambda _, tensor: change(tensor), of="block")
    except (InvalidArgumentError, UnsupportedError):  # there is none
        return output


def _first(output: Any) -> Tensor | None:
    """The first tensor of what a module returned."""
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _with(output, seen)
    return found[0] if found else None


def _rows(vectors: Tensor | None) -> Tensor | None:
    """The vectors of the texts that the head is checked on, in the order of the tokens.

    Returns:
        [texts * length, width]; None: they are laid out in another way.
    """
    if vectors is None or vectors.dim() not in (2, 3) or not vectors.is_floating_point():
        return None
    if vectors.shape[:-1] == (_LENGTH, _TEXTS):
        vectors = vectors.transpose(0, 1)
    elif vectors.shape[:-1] not in ((_TEXTS, _LENGTH), (_TEXTS * _LENGTH,)):
        return None
    return vectors.reshape(-1, vectors.shape[-1])


def _share_that_differs(found: Tensor, logits: Tensor) -> float:
    """The share of logits that differ by more than rounding. NaN equals NaN."""
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 3e-2
    found, logits = found.double(), logits.double()
    seen = logits.abs() < _MASKED
    usual = logits[seen].abs().median() if bool(seen.any()) else logits.new_zeros(())
    alike = (found - logits).abs() <= tolerance * (usual + logits.abs())
    alike |= ~seen & (found == logits) | found.isnan() & logits.isnan()
    return float((~alike).double().mean())
