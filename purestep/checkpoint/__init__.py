"""State on the disk, which is always whole: ``save`` and ``load``.

>>> import tempfile, torch
>>> state = {"w": torch.ones(2), "position": torch.tensor(7)}
>>> with tempfile.TemporaryDirectory() as folder:
...     save(f"{folder}/state", state)
...     load(f"{folder}/state", like=state)
{'w': tensor([1., 1.]), 'position': tensor(7)}

A tree of tensors is saved to a file, which any reader of safetensors opens, and one whose tensors are spread over ranks
(``ps.Shard``) by all ranks together to a folder, which ``torch.distributed.checkpoint`` reads; either is loaded as the other.
``Background`` saves while the training goes on, ``save_step`` keeps the last few, ``latest`` finds the last one, and ``export``
writes a model for other tools.
"""

from purestep.checkpoint.background import Background
from purestep.checkpoint.series import latest, save_step
from purestep.checkpoint.trees import export, load, save
from purestep.checkpoint.whole import check_writable, replacing

__all__ = ["save", "load", "save_step", "latest", "Background", "export", "replacing", "check_writable"]  # fmt: skip
