"""What ``remat`` keeps: the input of each layer and one layer's activations, and not those of all, compiled or not."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import purestep as ps
from proofs.test_t10_transforms import COMPILER
from tests.blocks import Function, deep
from tests.memory import LiveBytes

LAYERS, ROWS, WIDTH = 12, 256, 16
ACTIVATION = ROWS * WIDTH * 4


def by_vjp(loss: Function, weights: list[Tensor], x: Tensor) -> Any:
    """Which frees as it goes."""
    transform: Any = torch.func.vjp
    value, pull = transform(lambda weights: loss(weights, x), weights)
    return pull(torch.ones_like(value), retain_graph=False)


@pytest.mark.parametrize(
    "reverse",
    [
        lambda loss, weights, x: ps.grad_and_value(loss)(weights, x),
        by_vjp,
        lambda loss, weights, x: vmap(lambda x: by_vjp(loss, weights, x))(x.view(2, -1, WIDTH)),
    ],
)
def test_what_is_kept(reverse: Any) -> None:
    """The input of each layer, and all of one layer's; without remat, all of all layers."""
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)

    def peak(remat: Any) -> int:
        with LiveBytes() as live:
            reverse(lambda weights, x: deep(weights, x, remat), weights, x)
        return live.peak

    gc.collect()
    grads = 2 * LAYERS * WIDTH * WIDTH * 4  # of at most two examples
    # tanh keeps what it returns. Beside that are alive a cotangent, what is made of it, and a product before tanh takes it.
    assert peak(lambda fn: fn) >= 5 * LAYERS * ACTIVATION
    assert peak(ps.remat) <= (LAYERS + 5 + 3) * ACTIVATION + grads


PEAK = """
import sys
import torch
import purestep as ps
from benchmarks.memory import peak_on_host
from tests.blocks import deep

kind, backend = sys.argv[1:]
torch.manual_seed(0)
weights, m = [torch.randn(64, 64) / 8 for _ in range(12)], {"x": torch.randn(4096, 64)}
sgd = ps.optim.sgd(1e-3)
how = dict(weight_fn=lambda m: torch.ones(1))
for remat in (lambda fn: fn, ps.remat):
    loss = lambda w, m: deep(w, m["x"], remat).expand(1)
    if kind == "whole":
        step = ps.compile(ps.make_update_step(loss, sgd, **how), backend=backend, fullgraph=True)
        run = lambda: step(weights, sgd.init(weights), [m])
    elif kind == "graph":
        compiler = lambda fn: torch.compile(fn, backend=backend)
        step = ps.make_update_step(loss, sgd, compile=compiler, **how)
        run = lambda: step(weights, sgd.init(weights), [m])
    else:
        own = [w.clone().requires_grad_() for w in weights]
        compiled = torch.compile(loss, backend=backend, fullgraph=True)
        run = lambda: torch.autograd.grad(compiled(own, m).sum(), own)
    run(), run()
    print("peak", peak_on_host(run) / m["x"].nbytes)
    torch.compiler.reset()
"""


@pytest.mark.parametrize("kind", ["whole", "graph", "joint"])
def test_what_is_kept_under_the_compiler(kind: str) -> None:
    """Whether reverse mode is in the graph, or the compiler's own, which would compute as it likes."""

    # Only the compiler's own partition of a joint graph takes what is computed twice for one and the same.
    backend = COMPILER if kind == "joint" else "aot_eager"
    run = subprocess.run(
        [sys.executable, "-c", PEAK, kind, backend], capture_output=True, text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, timeout=240,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plain, remat = map(float, re.findall(r"^peak ([\d.]+)$", run.stdout, re.M))
    assert plain >= 4 * 12
    assert remat <= 12 + 5 + 5
