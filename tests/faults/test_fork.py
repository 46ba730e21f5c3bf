"""A capture goes on undisturbed while data loaders and other code fork processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from llm_instrumentation import ActivationReader

FORKING = """
import os, sys, warnings
import torch
from torch.utils.data import DataLoader
from llm_instrumentation import capture_activations

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.full((8,), float(i))

def main():
    net, outputs = torch.nn.Linear(8, 8), []
    net.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad(), capture_activations(net, sys.argv[2]):
        for method in ("fork", "spawn"):
            for persistent in (False, True):
                loader = DataLoader(Numbers(), batch_size=4, num_workers=2,
                                    multiprocessing_context=method, persistent_workers=persistent)
                for epoch in range(2):
                    for batch in loader:
                        net(batch)
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                net(batch)
            told = sum("goes on in process" in str(w.message) for w in caught)
            os._exit(0 if told == 1 else 3)
        assert os.waitpid(child, 0)[1] == 0, "the child was not told, or hung"
        net(batch)
    torch.save(outputs, sys.argv[2] + ".outputs")

if __name__ == "__main__":
    main()
"""


def test_forked_children_do_not_disturb_a_capture(tmp_path: Path) -> None:
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    path = tmp_path / "a.stream"
    done = subprocess.run(
        [sys.executable, str(program), "x", str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    with ActivationReader(path) as reader:
        assert reader.problem == ""
        outputs = torch.load(f"{path}.outputs")
        assert len(reader) == len(outputs) == 2 * 2 * 2 * 8 + 1
        for activation, output in zip(reader, outputs, strict=True):
            assert torch.equal(activation.to_torch(), output.half())
