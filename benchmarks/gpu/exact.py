"""Cuts of integers on the device: the bits of one batch, and the distance to the host."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from benchmarks.gpu.entries import Run
from purestep import optim, tree
from support import models
from support.strategies import cut_batch, get_weights, make_integer_batch

OPTIMIZERS = {
    "sgd": optim.sgd(0.5),
    "momentum": optim.sgd(0.5, 0.5, weight_decay=0.5),
    "nesterov": optim.sgd(0.5, 0.5, nesterov=True),
    "lion": optim.lion(0.5, 0.5, 0.5),
    "adamw": optim.adamw(0.125),
    "clipped adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
}
CUTS = {
    "one": [[0, 1, 2, 3]],
    "two": [[0, 3], [1, 2]],
    "four": [[3], [2], [1], [0]],
    "empty": [[0, 1], [], [2, 3]],
}


class Problem(NamedTuple):
    """Integers whose sums and products are exact, and weights whose sum is a power of two."""

    params: Any
    batch: dict[str, Tensor]


def make_problem() -> Problem:
    """Returns the problem, on the host."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([[1, 2], [0, 1], [1, 1], [2, 0]])
    return Problem(
        models.integer_params(generator), make_integer_batch(weights, generator)
    )


def to_device(values: Any, device: str) -> Any:
    """Returns copies of tensors on a device."""
    return tree.map(lambda leaf: leaf.to(device, copy=True), values)


def leaves_of(values: Any) -> list[Tensor]:
    """Returns the tensors of a tree."""
    return [*tree.flatten(values)[0]]


def run_exact(run: Run) -> None:
    """Compares all cuts with one batch, in each setting; and random numbers with the host's."""
    problem = make_problem()
    for name, optimizer in OPTIMIZERS.items():
        for normalize in ("loss", "grads"):
            for donate in (False, True):
                path = (name, f"normalize={normalize}", f"donate={donate}")
                with run.attempt(*path):
                    settings = {"normalize": normalize, "donate": donate}
                    compare_cuts(run, path, problem, optimizer, settings)
    with run.attempt("random"):
        compare_random_numbers(run)


def compare_cuts(
    run: Run,
    path: tuple[str, ...],
    problem: Problem,
    optimizer: Any,
    settings: dict[str, Any],
) -> None:
    """Takes one step for each cut, on the device and on the host."""
    step = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=get_weights, **settings
    )

    def take(rows: list[list[int]], device: str) -> list[Tensor]:
        params, batch = to_device(problem, device)
        new_params, opt_state, metrics = step(
            params, optimizer.init(params), cut_batch(batch, rows)
        )
        return leaves_of((new_params, opt_state, metrics.loss, metrics.num_tokens))

    expected, *others = [take(rows, run.device) for rows in CUTS.values()]
    equal = [all_equal(other, expected) for other in others]
    # Formulas of optimizers round, and a device need not round them as the host does.
    distance = find_distance(expected, take(CUTS["one"], "cpu"))
    run.check(*path, cuts_have_the_bits_of_one_batch=all(equal))
    run.check(*path, host_is_near=distance < 1e-12)
    run.add(*path, distance_to_host=distance)


def all_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Returns whether two lists of tensors have the same bits."""
    return all(
        torch.equal(one, other) for one, other in zip(tensors, others, strict=True)
    )


def find_distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    """Returns the largest difference between two lists of tensors."""
    distance = 0.0
    for one, other in zip(tensors, others, strict=True):
        if one.numel():
            difference = one.cpu().double() - other.cpu().double()
            distance = max(distance, float(difference.abs().max()))
    return distance


def compare_random_numbers(run: Run) -> None:
    """Draws with the same keys on the device and on the host."""
    keys = ps.random.fold_in(ps.random.key(5), torch.arange(4))
    on_device = keys.to(run.device)
    bits = ps.random.bits(on_device, (3, 33)).cpu()
    normal = ps.random.normal(on_device, (3, 33))
    ones = torch.ones(4, 3, 33)
    dropped = ps.random.dropout(ones.to(run.device), 0.3, on_device).cpu()
    run.check(
        "random", bits_of_the_host=torch.equal(bits, ps.random.bits(keys, (3, 33)))
    )
    run.check(
        "random",
        dropout_of_the_host=torch.equal(dropped, ps.random.dropout(ones, 0.3, keys)),
    )
    distance = find_distance([normal], [ps.random.normal(keys, (3, 33))])
    run.add("random", distance_of_normal_numbers=distance)
