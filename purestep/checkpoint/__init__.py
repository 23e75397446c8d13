"""Saves state to disk, and loads it.

>>> import tempfile, torch
>>> state = {"w": torch.ones(2), "position": torch.tensor(7)}
>>> with tempfile.TemporaryDirectory() as folder:
...     save(f"{folder}/state", state)
...     load(f"{folder}/state", like=state)
{'w': tensor([1., 1.]), 'position': tensor(7)}

``save`` writes a tree of tensors to a file of safetensors. All ranks together write a tree with
``ps.Shard``, to a folder of ``torch.distributed.checkpoint``. ``load`` reads either, with or
without ``Shard``. ``AsyncCheckpointer`` saves while the training goes on. ``save_step`` keeps the
last few checkpoints, and ``latest_checkpoint`` finds the last one. ``export_safetensors`` writes a
model for other tools, and ``load_safetensors`` reads what they wrote, each rank its part.
"""

from purestep.checkpoint.pretrained import load_safetensors
from purestep.checkpoint.store import (
    AsyncCheckpointer,
    export_safetensors,
    latest_checkpoint,
    load,
    save,
    save_step,
)

__all__ = [
    "save",
    "load",
    "save_step",
    "latest_checkpoint",
    "AsyncCheckpointer",
    "export_safetensors",
    "load_safetensors",
]
