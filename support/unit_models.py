"""Draws modules of integers with parts that can be units: nested, called twice, tied, frozen, with dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import purestep as ps
from support.models import integers
from support.strategies import Chooser, choose_settings

WIDTH = 3
ROWS = 8
"""A power of two, so that the division by N is exact."""


class Inner(nn.Module):
    """Multiplies by a matrix of integers, and drops half of the results where it has keys."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers((WIDTH, WIDTH), generator, size=1))
        self.shift = nn.Parameter(integers((WIDTH,), generator))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.relu(x @ self.weight + self.shift)
        dropped: Tensor = self.dropout(product)
        return dropped


class Outer(nn.Module):
    """Has a param besides those of its part, which may be a unit in a unit."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = Inner(generator)
        self.scale = nn.Parameter(integers((WIDTH,), generator, size=1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale * self.inner(x)
        return scaled


class Layers(nn.Module):
    """Runs layers one after the other, of which two may be one object."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum(-1)


class UnitsCase(NamedTuple):
    """A module, its units, and the microbatches of each rank, which has one at least."""

    module: Layers
    unit_names: set[str]
    is_remat: bool
    groups: list[list[dict[str, Tensor]]]
    settings: dict[str, Any]


def make_layers(choose: Chooser) -> Layers:
    """Makes one to four layers; one may come twice, share its weight, or have a frozen shift."""
    generator = choose.generator()
    layers: list[nn.Module] = []
    for _ in range(choose.randint(1, 3)):
        kind = choose.choice([Inner, Outer])
        layers.append(kind(generator))
    if choose.maybe():
        layers.append(choose.choice(layers))
    module = Layers(layers)
    inner = [part for part in module.modules() if isinstance(part, Inner)]
    if choose.maybe():
        inner[-1].weight = inner[0].weight
    if choose.maybe() and len(inner) > 1:
        inner[-1].shift.requires_grad = False
    if not choose.maybe():
        module.eval()
    return module


def make_units_case(choose: Chooser) -> UnitsCase:
    """Makes a case; a unit may be any layer, or the inner part of one."""
    module = make_layers(choose)
    candidates = []
    for name, part in module.named_modules():
        if isinstance(part, Inner | Outer):
            candidates.append(name)
    unit_names = {name for name in candidates if choose.maybe()}
    unit_names = unit_names or {candidates[0]}
    generator = choose.generator()
    batch = {
        "x": integers((ROWS, WIDTH), generator),
        "key": ps.random.split(ps.random.key(choose.randrange(99)), ROWS),
    }
    num_ranks = choose.randint(1, 3)
    rows = [*range(ROWS)]
    groups: list[list[dict[str, Tensor]]] = [[] for _ in range(num_ranks)]
    num_parts = choose.randint(num_ranks, 5)
    cuts = sorted(choose.sample(range(1, ROWS), num_parts - 1))
    starts = [0, *cuts]
    ends = [*cuts, ROWS]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = {key: leaf[rows[start:end]] for key, leaf in batch.items()}
        rank = number if number < num_ranks else choose.randrange(num_ranks)
        groups[rank].append(part)
    return UnitsCase(
        module,
        unit_names,
        is_remat=choose.maybe(),
        groups=groups,
        settings=choose_settings(choose, accum_dtype=None),
    )


def make_keyed_loss(apply: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
    """Makes the loss of a module: integers, and with them their number as aux."""

    def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> ps.LossOutput:
        key = microbatch["key"] if is_training else None
        losses = apply(params, microbatch["x"], key=key).square()
        return ps.LossOutput(losses, aux=torch.ones_like(losses).sum())

    return loss_fn


def weigh_rows(microbatch: dict[str, Tensor]) -> Tensor:
    """Weighs each row alike."""
    return torch.ones(len(microbatch["x"]), dtype=torch.int64)
