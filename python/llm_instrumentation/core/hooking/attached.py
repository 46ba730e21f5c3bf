"""The hooks that a capture has on its models, and which modules they have seen run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from ..._warn import warn
from ...errors import UnsupportedError
from ..calls.compiled import outside, outside_of_compiled
from ..calls.own_hook import OwnHook
from ..calls.steps import Steps
from ..config import InstrumentationConfig
from ..tensors.capture_state import CaptureState
from ..tensors.modules import original_name
from ..tensors.sink import ModuleTensors, TensorSink
from .gradients import Gradients
from .inside import can_emit
from .module_hooks import ModuleHooks
from .rewiring import Hooked, Removable, Rewiring
from .silent import unaccounted

__all__ = ["AttachedHooks"]


class AttachedHooks:
    """The hooks of a capture on the selected modules of its models.

    Args:
        models: the models.
        labels: the label of each model.
        selected: the modules of each model to hook, with their names.
        state: the state of the capture.

    Attributes:
        ran: a byte per selected module, 1 once the module ran.
        unwalked: names of types that hold tensors but cannot be walked.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        labels: Sequence[str],
        selected: Sequence[Sequence[tuple[str, nn.Module]]],
        state: CaptureState,
    ) -> None:
        self.ran = bytearray(sum(map(len, selected)))
        self.unwalked: set[str] = set()
        self._state = state
        self._models = list(models)
        self._labels = labels
        self._selected = list(selected)
        self._hooked: list[Hooked] = []
        self._moved: set[tuple[int, str]] = set()  # places of hooked modules that others have taken

    @contextlib.contextmanager
    def attached(
        self,
        config: InstrumentationConfig,
        sink: TensorSink,
        steps: Steps,
        gradients: Gradients,
        *,
        inside: bool,
    ) -> Iterator[Rewiring]:
        """Hooks the models in the block.

        Args:
            config: the configuration of the capture.
            sink: receives the tensors.
            steps: the steps of the capture.
            gradients: receives the outputs whose gradients are captured.
            inside: capture inside of compiled code.

        Yields:
            the places of the hooked modules.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(gradients.forget)
            undo.callback(self._remove)
            undo.callback(steps.entries.remove)
            around = outside_of_compiled(self._models) if inside else set()
            steps.entries.hook_begins(inside=inside)
            for number, modules in enumerate(self._selected):
                for name, module in modules:
                    tensors = ModuleTensors(sink, self._labels[number], name)
                    hooks = ModuleHooks(
                        self._state, steps, config, gradients, tensors,
                        len(self._hooked), self.ran, self.unwalked,
                    )  # fmt: skip
                    handles: list[Removable] = []
                    self._hooked.append(Hooked(number, name, module, tensors.root, handles))
                    if not inside or not can_emit(module):
                        handles.extend(hooks.attach(module, OwnHook))
                    elif module in around:
                        handles.extend(hooks.attach(module, lambda hook: OwnHook(outside(hook))))
                    else:
                        handles.extend(hooks.attach_inside(module))
            rewiring = Rewiring(self._models, list(self._hooked), self._rewired)
            undo.enter_context(rewiring.followed(inside=inside))
            steps.entries.hook_ends()
            yield rewiring

    def silent(self) -> tuple[str, ...]:
        """The names of selected modules that have not run."""
        names = (name for modules in self._selected for name, _ in modules)
        return tuple(name for name, ran in zip(names, self.ran, strict=True) if not ran)

    def missed(self) -> list[str]:
        """The names of modules that should have run but that the hooks did not see."""
        found, at = [], 0
        for model, modules in zip(self._models, self._selected, strict=True):
            found += unaccounted(model, modules, self.ran[at : at + len(modules)])
            at += len(modules)
        return found

    def replaced(self) -> list[str]:
        """The names of hooked modules that have left their places, and were not told before."""
        there: list[dict[str, nn.Module]] = [
            {
                original_name(name): module
                for name, module in model.named_modules(remove_duplicate=False)
            }
            for model in self._models
        ]
        return [
            one.name
            for one in self._hooked
            if (one.model, one.name) not in self._moved
            and there[one.model].get(one.name) is not one.module
        ]

    def forget(self) -> None:
        """Drops the models, when the session is closed. Call no other method afterwards."""
        self._models.clear()
        self._selected.clear()
        self._hooked.clear()

    def _remove(self) -> None:
        for one in self._hooked:
            for handle in one.handles:
                handle.remove()

    def _rewired(self, place: str, gone: list[Hooked]) -> None:
        """Handles that another module has taken the place of hooked ones."""
        reason = (
            f"another module has taken the place of {place!r} during the capture, perhaps around it"
        )
        self._moved.update((one.model, one.name) for one in gone)
        for one in gone:
            self._state.note(one.layer, reason)
        told = f"{reason}: what was there is not captured from now on, nor what is inside it"
        if self._state.strict:
            self._state.fail(UnsupportedError(told))
        else:
            warn(told)
