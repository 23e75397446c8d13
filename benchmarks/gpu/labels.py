"""What happens where a label is no class. Each loss has a process, since CUDA may end it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu.entries import Run
from benchmarks.gpu.processes import ROOT

CLASSES = 8
LABELS = [[1, 2], [CLASSES, 3]]
LOSSES = ["cross_entropy", "linear_cross_entropy"]
SECONDS = 60


def run_labels(run: Run) -> None:
    """Adds what each loss does. Whatever it is, it is no error of this program."""
    for name in LOSSES:
        with run.attempt(name):
            run.add(name, **try_loss(name, run.device))


def try_loss(name: str, device: str) -> dict[str, Any]:
    """Takes a step in another process."""
    command = [sys.executable, "-m", "benchmarks.gpu.labels", name, device]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"nothing within {SECONDS} s"}
    lines = result.stdout.splitlines()
    outcome = json.loads(lines[-1]) if lines else result.stderr[-300:]
    return {"status": result.returncode, "outcome": outcome}


def take_step(name: str, device: str) -> str:
    """Returns what a step with a label that is no class gives, or the error that it raises."""
    import torch

    import purestep as ps

    def loss_fn(params: Any, batch: Any) -> Any:
        if name == "cross_entropy":
            return ps.losses.cross_entropy(batch["x"] @ params, batch["labels"])
        return ps.losses.linear_cross_entropy(batch["x"], params.T, batch["labels"])

    params = torch.ones(4, CLASSES, device=device)
    batch = {
        "x": torch.ones(2, 2, 4, device=device),
        "labels": torch.tensor(LABELS, device=device),
    }
    optimizer = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, optimizer)
    try:
        new_params, _, metrics = step(params, optimizer.init(params), [batch])
        total = float(new_params.sum())
        return f"no error: loss {float(metrics.loss)}, params sum to {total}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"


if __name__ == "__main__":
    print(json.dumps(take_step(sys.argv[1], sys.argv[2])), flush=True)
