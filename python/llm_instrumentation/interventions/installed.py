"""Edits at work in a model, for the length of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from ..core.calls.arguments import Given
from ..core.calls.own_hook import OwnHook
from ..core.hooking.eager import run_eagerly
from ..core.outputs import replace_tensor
from ..core.scope import Scope, scoped
from ..errors import InvalidArgumentError, StrapError, UnsupportedError
from .edits import Call, Edit
from .experts import Experts
from .running.additions import Additions, Together
from .running.forwards import Forwards
from .running.places import Places
from .running.spots import Spot, resolve
from .sites import role_of

__all__ = ["Applied", "UnusedEditError", "in_turn", "intervene"]

Turn: TypeAlias = Callable[..., AbstractContextManager[None]]
"""See `in_turn`."""


class UnusedEditError(StrapError, RuntimeError):
    """An edit was not applied in its block, so the results are those of the unchanged model."""


class Applied:
    """The counters of the edits of a block, so far.

    Attributes:
        edits: the edits.
        counts: for each edit, at how many calls of its module it was applied.
    """

    def __init__(self, edits: Sequence[Edit], forwards: Forwards) -> None:
        self.edits = tuple(edits)
        self.counts = [0] * len(edits)
        self._forwards = forwards
        self._at_work: Collection[int] = range(len(edits))
        self._first = 0  # the forward call that is step 0

    @property
    def steps(self) -> int:
        """The number of the model's forward calls in the block."""
        return self._forwards.count - self._first

    def __repr__(self) -> str:
        says = ", ".join(f"{e} {n} times" for e, n in zip(self.edits, self.counts, strict=True))
        return f"<Applied in {self.steps} steps: {says}>"


@contextmanager
def intervene(
    model: nn.Module,
    *edits: Edit,
    unused: Literal["raise", "ignore"] = "raise",
    scope: Scope = "thread",
) -> Iterator[Applied]:
    """Changes what modules of a model compute, inside the block.

    Edits of one tensor are applied in the order given. Blocks may be nested: the edits of the inner
    one see what those of the outer one have made. Captures see the edited values if they begin
    inside the block. The model's tensors are not changed in place, and gradients flow through the
    edits. Modes, hooks and parameters are afterwards as before, also after an error. Each thread
    may have a block of its own. Quantised models can be edited where tensors have floats.

    Args:
        model: the model. Set it to evaluation mode. A compiled one runs eagerly in the block, with
            a warning.
        edits: what is changed.
        unused: "raise" an error at the end of the block if an edit was not applied, or "ignore" it.
            After an exception in the block there is no such check.
        scope: whose calls of the model are changed: those of the "thread" or asyncio "task" that
            opened the block, or of all threads of the "process".

    Yields:
        what the edits have done so far.

    Raises:
        InvalidArgumentError: (a ValueError) there is no such layer or head; the message names
            similar ones. While the model runs: there is no tensor at this place; a shape, type or
            device does not fit; or the call has no such position or sequence.
        UnsupportedError: (a TypeError) a module in training mode has dropout, random
            slopes, jitter, or batch norms that change what the model keeps (call
            ``model.eval()``); the model is replicated by `DataParallel`, is TorchScript, or was
            compiled and torch is older than 2.6. While the model runs: the module is recomputed by
            gradient checkpointing, the tensor is quantized, nested or sparse, or has integers where
            the edit needs floats, another module has taken the place of one with an edit, or it
            cannot be told what a site with `side="added"` adds to the residual stream.
        UnusedEditError: (a RuntimeError) at the end: an edit was not applied. The message says
            whether its module ran.
        UnknownActivationError: (a KeyError) while the model runs: a capture has no tensor of this
            name.
        ValueError: `unused` or `scope` is unknown.
    """
    if unused not in ("raise", "ignore"):
        raise InvalidArgumentError(f'unused = {unused!r}: give "raise" or "ignore"')
    with _installed(model, edits, scope) as (applied, hooked):
        yield applied
    if unused == "raise":
        _check_used(applied, hooked, range(len(edits)))


@contextmanager
def in_turn(model: nn.Module, edits: Sequence[Edit]) -> Iterator[Turn]:
    """Edits of which some have a turn, as if they were in a block of their own.

    The hooks are made once for all of them, because that takes as long as a run of a small model.

    Args:
        model: as for `intervene`.
        edits: the edits.

    Yields:
        a function of the numbers of edits. They are at work in the block that it returns. With
        `all_used=False` there is no error for edits that were not applied.

    Raises:
        InvalidArgumentError: as for `intervene`.
        UnsupportedError: likewise.
        UnusedEditError: at the end of a turn: an edit was not applied.
    """
    with _installed(model, edits, "thread") as (applied, hooked):
        applied._at_work = ()

        @contextmanager
        def turn(*numbers: int, all_used: bool = True) -> Iterator[None]:
            applied._at_work, applied._first = frozenset(numbers), applied._forwards.count
            try:
                yield
                if all_used:
                    _check_used(applied, hooked, applied._at_work)
            finally:
                applied._at_work = ()
                for number in numbers:
                    applied.counts[number] = 0
                for one in hooked:
                    one.forget()

        yield turn


@contextmanager
def _installed(
    model: nn.Module, edits: Sequence[Edit], scope: Scope
) -> Iterator[tuple[Applied, list[_Hooked]]]:
    for edit in edits:
        if not isinstance(edit, Edit):
            raise InvalidArgumentError(
                f"{edit!r} is no edit: give zero(...), replace(...) and so on"
            )
        if (role := role_of(edit.site)) is not None:
            raise InvalidArgumentError(
                f"{edit}: positions = {role!r} is a span of prompts, and intervene has none: give "
                f"positions=prompts.spans[{role!r}]"
            )
    check_model(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    spots = resolve(model, [edit.site for edit in edits], modules)
    with scoped(scope) as mine, run_eagerly([model], when="in the block of intervene"):
        tensors: dict[tuple[int, str], list[int]] = {}
        for number, spot in enumerate(spots):
            tensors.setdefault((id(spot.module), spot.side), []).append(number)
        # A module may have several names: the site's own one counts too.
        names = {name for spot in spots for name in (spot.name, spot.site.layer.partition("[")[0])}
        places = Places(modules, names)
        forwards = Forwards(model, len(tensors), mine, places)
        applied = Applied(edits, forwards)
        scopes = {spot.scope[0]: Additions(*spot.scope) for spot in spots if spot.scope}
        hooked = [
            _Hooked(
                forwards, applied, counter, [(number, spots[number]) for number in numbers], scopes
            )
            for counter, numbers in enumerate(tensors.values())
        ]
        with forwards.watched([*scopes.values(), *hooked]):
            yield applied, hooked


class _Hooked:
    """The output or input of one module, and its edits.

    Args:
        forwards: the model's forward calls.
        applied: counts the edits.
        counter: the number of this object among all of the block; its counter in a step.
        edits: the numbers of the edits, and where they are.
        scopes: where additions to residual streams are found, by the names of the layers.
    """

    def __init__(
        self, forwards: Forwards, applied: Applied, counter: int, edits: list[tuple[int, Spot]],
        scopes: Mapping[str, Additions],
    ) -> None:  # fmt: skip
        self.edits = edits
        self.ran = 0
        self._forwards = forwards
        self._applied = applied
        self._counter = counter
        self._kept: dict[int, dict[str, Any]] = {number: {} for number, _ in edits}
        self._name = edits[0][1].name
        scope = edits[0][1].scope
        self._additions = None if scope is None else scopes[scope[0]]

    def forget(self) -> None:
        """Forgets the calls before, and what edits have kept of them."""
        self.ran = 0
        for kept in self._kept.values():
            kept.clear()

    def attach(self) -> RemovableHandle | Together:
        """Registers the hook."""
        spot = self.edits[0][1]
        if self._additions is not None:
            undo = ExitStack()
            for handle in (
                nn.Module.register_forward_pre_hook(spot.module, OwnHook(self._begins)),
                nn.Module.register_forward_hook(spot.module, OwnHook(self._ended)),
            ):
                undo.callback(handle.remove)
            return Together(undo)
        if spot.experts is not None:
            hook = OwnHook(self._parts, spot.experts)
            return nn.Module.register_forward_hook(spot.module, hook, with_kwargs=True)
        if spot.side == "input":
            hook = OwnHook(self._inputs)
            return nn.Module.register_forward_pre_hook(spot.module, hook, with_kwargs=True)
        return nn.Module.register_forward_hook(spot.module, OwnHook(self._output))

    def _output(self, module: nn.Module, args: Any, output: Any) -> Any:
        new = output
        for path, change in self._due():
            new = replace_tensor(new, path, change, of=self._name)
        return None if new is output else new

    def _parts(
        self, experts: Experts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
        output: Any,
    ) -> Any:  # fmt: skip
        """Changes the parts of experts in what a block returns."""
        due = list(self._due())
        if not due:
            return None
        received = next(iter((*args, *kwargs.values())), None)
        if not isinstance(received, Tensor) or not isinstance(output, Tensor):
            raise UnsupportedError(
                f"{self._name!r}: its experts are known for blocks that receive and return one "
                f"tensor, not a {type(received).__name__} and a {type(output).__name__}"
            )
        parts = experts.parts(received)
        experts.check_sum(parts, output)
        new = before = parts.movedim(0, -2).flatten(-2)
        for path, change in due:
            new = change(path, new)
        if new is before:
            return None
        if new.requires_grad:
            # So the gradient of what the block returns reaches the parts, and them alone.
            rounding = output.detach() - self._sum(before, parts).detach()
            return (self._sum(new, parts) + rounding.reshape(received.shape)).reshape(output.shape)
        return output + self._sum(new - before, parts).reshape(output.shape)

    @staticmethod
    def _sum(side_by_side: Tensor, parts: Tensor) -> Tensor:
        """The sum of parts that stand side by side, [..., width]."""
        return side_by_side.reshape(*parts.shape[1:-1], len(parts), -1).sum(-2)

    def _inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:  # as for `Steps.enter`
            return None
        given_args, given_kwargs = args, kwargs
        for path, change in self._due():
            in_args = args if not path else path[1:2].isdigit()
            if in_args:
                args = replace_tensor(args, path, change, of=self._name, verb="is called with")
            else:
                kwargs = replace_tensor(kwargs, path, change, of=self._name, verb="is called with")
        if args is given_args and kwargs is given_kwargs:
            return None
        return args, kwargs

    def _begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert self._additions is not None
        due = [change for _, change in self._due()]

        def change(name: str | None, tensor: Tensor) -> Tensor:
            for one in due:
                tensor = one(name, tensor)
            return tensor

        self._additions.begin(self._name, change if due else None)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert self._additions is not None
        self._additions.end(output)

    def _due(self) -> Iterator[tuple[str, Callable[[Any, Tensor], Tensor]]]:
        """The edits of the call that runs: the path of the tensor, and the change."""
        if not self._applied._at_work:
            return
        here = self._forwards.here(self._name)
        if here is None:
            return
        place, given = here
        applied = self._applied
        step, call = place.step - applied._first, place.calls[self._counter]
        place.calls[self._counter] += 1
        self.ran += 1
        for number, spot in self.edits:
            if number in applied._at_work and spot.site.includes(step, call):
                yield spot.path, functools.partial(self._change, number, spot, given, step, call)

    def _change(
        self, number: int, spot: Spot, given: Given | None, step: int, call: int,
        path: str | None, tensor: Tensor,
    ) -> Tensor:  # fmt: skip
        edit = self._applied.edits[number]
        new = edit._apply(Call(spot, path, tensor, given, step, call, self._kept[number]))
        self._applied.counts[number] += 1
        return new


def check_model(model: nn.Module) -> None:
    """Refuses models in which edits would not do what they say."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise UnsupportedError(
                "the model is replicated by DataParallel, and replicas run beside each other: give "
                "model.module, and call that"
            )
        if module.training and (found := _of_training(module)):
            what, effect = found
            raise UnsupportedError(
                f"{what} in {name!r} ({type(module).__name__}), {effect}: call model.eval() first"
            )


def _of_training(module: nn.Module) -> tuple[str, str] | None:
    """What a module does in training mode that edits can't be told from, and its effect.

    None: nothing that is known.
    """
    differ = "so two runs differ without any edit"
    if chance := _chance(module, "drop"):
        return f"dropout is active: {chance}", differ
    if chance := _chance(module, "jitter"):
        return f"noise is active: {chance}", differ
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return f"slopes are random: {module.lower} to {module.upper}", differ
    if isinstance(module, _NormBase) and module.running_mean is not None:
        return "statistics are of the batch", "and each run changes those that the model keeps"
    return None


def _chance(module: nn.Module, word: str) -> str | None:
    """The attribute above 0 of a module that has a word in its name; None: there is none."""
    attributes = {k: v for k, v in vars(module).items() if word in k.lower()}
    if word == "drop" and isinstance(module, _DropoutNd):
        attributes["p"] = module.p
    for name, value in attributes.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return f"{name} = {value}"
    return None


def _check_used(applied: Applied, hooked: Iterable[_Hooked], numbers: Container[int]) -> None:
    for one in hooked:
        for number, _ in one.edits:
            if number not in numbers or applied.counts[number]:
                continue
            if not applied.steps:
                why = (
                    "the model was not called in the block. Calls of other threads count with "
                    'scope="process"'
                )
            elif not one.ran:
                why = "its module did not run"
            else:
                why = (
                    f"its module ran {one.ran} times in {applied.steps} steps, and not at the "
                    "calls and steps of the site"
                )
            raise UnusedEditError(
                f'{applied.edits[number]} was not applied: {why}. unused="ignore" allows that'
            )
