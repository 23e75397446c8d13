"""State on the disk: ``save`` and ``load``.

>>> import tempfile, torch
>>> state = {"w": torch.ones(2), "position": torch.tensor(7)}
>>> with tempfile.TemporaryDirectory() as folder:
...     save(f"{folder}/state", state)
...     load(f"{folder}/state", like=state)
{'w': tensor([1., 1.]), 'position': tensor(7)}

A tree of tensors is saved to a file of safetensors, and a tree with ``ps.Shard`` by all ranks
together to a folder of ``torch.distributed.checkpoint``; either is loaded as the other.
``Background`` saves while the training goes on. ``save_step`` keeps the last few checkpoints, and
``latest`` finds the last one. ``export`` writes a model for other tools.
"""

from purestep.checkpoint.store import Background, export, latest, load, save, save_step

__all__ = ["save", "load", "save_step", "latest", "Background", "export"]
