"""`prepare`: compiles what a capture needs before the capture begins."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from ...errors import InvalidArgumentError
from ..calls.compiled import is_compiled, outside_of_compiled
from ..config import InstrumentationConfig
from ..selection import select_modules
from .inside import Emission, can_emit, runs_inside

__all__ = ["PreparedModel", "prepare"]


class PreparedModel:
    """A model with compiled code that is ready for captures; see :func:`prepare`."""

    def __init__(self, emissions: list[Emission]) -> None:
        self._emissions = emissions

    def close(self) -> None:
        """Lets the model run its own compiled code again. What was compiled stays with torch."""
        for emission in self._emissions:
            emission.remove()

    def __enter__(self) -> PreparedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def prepare(model: nn.Module, config: InstrumentationConfig | None = None) -> PreparedModel:
    """Gets a compiled model ready for captures, so that none of them waits for the compiler::

        prepare(model, config)
        model(**inputs)  # compiles what captures with this configuration need

    From now on the model runs the compiled code that captures of the same modules run. Without a
    capture that code passes nothing on, at nearly the same speed.

    Args:
        model: the model, which ``torch.compile`` has compiled, or parts of it.
        config: the configuration of the captures; balanced by default.

    Returns:
        ends it by :meth:`~PreparedModel.close`, or as a context manager. If it is dropped, the
        model stays as it is.

    Raises:
        InvalidArgumentError: (a ValueError) captures with this configuration run no compiled code:
            the model is not compiled, or ``with_compiled("eager")`` is set.
        UnsupportedError: (a TypeError) captures inside of compiled code are not possible; the
            message says why.
        LayerSelectionError: (a ValueError) the configuration selects no module.
    """
    config = InstrumentationConfig.balanced() if config is None else config
    config.validate()
    if config.compiled == "eager":
        raise InvalidArgumentError(
            'with_compiled("eager") captures outside of compiled code: there is nothing to prepare'
        )
    if config.compiled == "auto" and not any(map(is_compiled, model.modules())):
        raise InvalidArgumentError(
            "the model is not compiled: give the one that torch.compile returned. If a compiled "
            'function calls the model, set with_compiled("inside") here and for the captures'
        )
    runs_inside([model], config.with_compiled("inside"))  # raises if it is not possible
    around = outside_of_compiled([model])
    emissions = []
    for _, module in select_modules(model, config):
        if can_emit(module) and module not in around:
            if config.inputs:
                emissions.append(Emission(module, None, kv_cache=False, inputs=True))
            emissions.append(Emission(module, None, kv_cache=config.kv_cache))
    return PreparedModel(emissions)
