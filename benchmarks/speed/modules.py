"""What does a step over ``from_module`` cost, against one over ``torch.func.functional_call``?

    python -m benchmarks.speed.modules

A network of 100 submodules, so narrow that the time is that of asking for operations. Both make the same update.
"""

import argparse
import functools
import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

import purestep as ps
from benchmarks.speed import timing

OURS, THEIRS, ALONE = (
    "from_module",
    "functional_call",
    "the module itself, forward and backward",
)


class Block(nn.Module):
    """Three submodules, with itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        return x + self.linear(self.norm(x)).tanh()


def measure(options: argparse.Namespace) -> timing.Seconds:
    """Seconds of each way."""
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(options.width) for _ in range(33)])
    assert len([*module.modules()]) == 100
    x = torch.randn(options.rows, options.width)
    params, apply = ps.from_module(module)
    optimizer = ps.optim.sgd(0.01)
    opt_state = optimizer.init(params)

    def step(call: Callable[..., Tensor]) -> Callable[[], object]:
        update_step = ps.make_update_step(
            lambda p, x: call(p, x).square().mean(1),
            optimizer,
            weight_fn=lambda x: torch.ones(len(x)),
        )
        return functools.partial(update_step, params, opt_state, [x])

    def alone() -> None:
        module(x).square().mean().backward()
        module.zero_grad()

    ways = {
        OURS: step(apply),
        THEIRS: step(lambda p, x: functional_call(module, p, (x,))),
    }
    one, other = (way()[0] for way in ways.values())  # type: ignore[index]
    assert all(torch.equal(one[name], other[name]) for name in params)
    return timing.in_turn({**ways, ALONE: alone}, options.repeats, warmup=3, block=5)


def main() -> None:
    """Measures in fresh processes, and prints."""
    parser = timing.arguments(__doc__, repeats=60, launches=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(measure(options)))
        return
    launches = [
        timing.launch("benchmarks.speed.modules") for _ in range(options.launches)
    ]
    timing.show("a step on 100 submodules", timing.joined(launches, [THEIRS]))


if __name__ == "__main__":
    main()
