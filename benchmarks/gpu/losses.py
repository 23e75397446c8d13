"""Compiled updates of random losses on the device, beside eager ones."""

from __future__ import annotations

import torch

from benchmarks.gpu.entries import Run
from benchmarks.random_losses import WAYS, compare, draw_loss

SEEDS = [1, 10, 15, 22, 29, 35, 39]
"""Losses whose updates plain ``torch.compile`` computes wrong on a CPU, by torch 2.13."""

SECONDS = 25
"""How long one update may take. Nearly all of it is compilation."""


def run_losses(run: Run) -> None:
    """Compares each loss in each way while there is time; in a tiny run, eager with itself."""
    for seed in SEEDS:
        for way in ["eager"] if run.tiny else WAYS:
            path = (f"loss {seed}", way)
            if not run.has_time(SECONDS, *path):
                return
            with run.attempt(*path):
                distance, is_wrong = compare(draw_loss(seed), way, run.device)
                run.add(*path, distance=distance)
                run.check(*path, right=not is_wrong)
        torch.compiler.reset()
