"""One safetensors file per tensor."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from .contender import Absent, Contender, each_tensor

OWN_PROCESS = False


def contenders(model: nn.Module) -> list[Contender]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise Absent(str(error)) from None

    def save(tensor: Tensor, path: Path) -> None:
        save_file({"tensor": tensor.contiguous()}, path)

    return [Contender("safetensors files", each_tensor(model, ".safetensors", save))]
