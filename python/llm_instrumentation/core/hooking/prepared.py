"""Models whose compiled code is ready for captures before they begin."""

from __future__ import annotations

import dataclasses
from types import TracebackType

from torch import nn

from ...errors import InvalidArgumentError
from ..calls.compiled import is_compiled, outside_of_compiled
from ..config import InstrumentationConfig
from ..selection import select_modules
from .inside import Emission, can_emit, runs_inside

__all__ = ["PreparedModel"]


class PreparedModel:
    """A model with compiled code that is ready for captures, from construction to :meth:`close`.

    Args:
        model: the model.
        config: the configuration of the captures.

    Raises:
        InvalidArgumentError, UnsupportedError, LayerSelectionError: see
            :func:`~llm_instrumentation.core.capture.prepare`.
    """

    def __init__(self, model: nn.Module, config: InstrumentationConfig) -> None:
        config.validate()
        if config.compiled == "eager":
            raise InvalidArgumentError(
                'with_compiled("eager") captures outside of compiled code: nothing to prepare'
            )
        if config.compiled == "auto" and not any(map(is_compiled, model.modules())):
            raise InvalidArgumentError(
                "the model is not compiled: give what torch.compile returned. If a compiled "
                'function calls the model, set with_compiled("inside") here and for the captures'
            )
        runs_inside(
            [model], dataclasses.replace(config, compiled="inside")
        )  # raises if it is not possible
        around = outside_of_compiled([model])
        self._emissions: list[Emission] = []
        for _, module in select_modules(model, config):
            if can_emit(module) and module not in around:
                if config.inputs:
                    self._emissions.append(Emission(module, None, kv_cache=False, inputs=True))
                self._emissions.append(Emission(module, None, kv_cache=config.kv_cache))

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
