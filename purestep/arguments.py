"""What a step is given, refused where it cannot be that, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, check_axis, overlap, within
from purestep.form import Flat, Form, flat, once
from purestep.torch_internals import holds_tensors
from purestep.types import LossFn, Microbatch, Params, WeightFn


def check_functions(loss_fn: LossFn, weight_fn: WeightFn | None, axis: Axis) -> None:
    """Refuses what is neither a function nor an axis."""
    check_callable("loss_fn", loss_fn)
    if weight_fn is not None:
        check_callable("weight_fn", weight_fn)
    check_axis(axis)


def check_callable(name: str, value: object) -> None:
    """Refuses what cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuses what is none of the choices, a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(
            f"{name}={value!r} must be one of {', '.join(map(repr, get_args(choices)))}"
        )


def checked_params(params: Params, axis: Axis) -> Flat:
    """The params of a step over this axis, flattened; refused where they cannot be."""
    given = flat(params)
    if not _fits(given.form):
        _explain(params, given.leaves)
    if given.form.spread:
        _check_pieces(params, given, axis)
    return given


def _check_pieces(params: Params, given: Flat, axis: Axis) -> None:
    """Refuses pieces over an axis that shares some ranks with the step's own, and those that are not what they say."""
    others = {place.axis for place in given.form.spread if place}
    mixed = [other for other in others if overlap(other, axis) and not within(other, axis)]
    for position, (leaf, place) in enumerate(zip(given.leaves, given.form.spread, strict=True)):
        if place is None:
            continue
        if place.axis in mixed:
            path = tree.paths(params, "params")[position]
            raise ValueError(
                f"{path} is spread over {place.axis}, some of whose ranks are of {axis}, over which this step is: spread it over "
                "that axis itself, over some of its dimensions, or over an axis whose ranks hold the same tokens, as in tensor parallelism"
            )
        if leaf.shape != place.piece_shape:
            path = tree.paths(params, "params")[position]
            raise ValueError(
                f"{path} has shape {tuple(leaf.shape)}, but this rank's piece of a tensor of shape {place.shape}, cut "
                f"along dim={place.dim} over {place.axis}, has shape {place.piece_shape}: take ps.shard, or torch.chunk"
            )


@once
def _fits(form: Form) -> bool:
    summable = form.plain and {*form.dtypes} <= {*tree.SUM_DTYPES}
    return summable and len(form.devices) == 1 and {*form.devices}.pop().type != "mps"


def _explain(params: Params, leaves: list[Tensor]) -> None:
    """Raises where these are no params."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: take params, apply = ps.from_module(module), and call "
            "apply(params, ...) in loss_fn, or torch.func.functional_call with params of your own"
        )
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            plain = type(leaf) is Tensor or not holds_tensors(leaf)
            if leaf.dtype not in tree.SUM_DTYPES or not plain:
                _refuse_kind(tree.paths(params, "params")[position], leaf)
        else:
            found = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{tree.paths(params, 'params')[position]} is {found}, which has no gradient: params are "
                "floating point tensors in containers that optree knows; keep other data in the "
                "microbatch or close over it, and register classes of your own in purestep.tree.NAMESPACE"
            )
    if not leaves:
        raise ValueError("params holds no tensors, so there is nothing to update")
    device = leaves[0].device
    places = zip(tree.paths(params, "params"), leaves, strict=True)
    for other, leaf in places:
        if leaf.device == device:
            continue
        raise ValueError(
            f"{tree.paths(params, 'params')[0]} is on {device}, but {other} is on {leaf.device}: the params of a step are "
            "on one device; move them there"
        )
    if device.type == "mps":
        raise ValueError(
            f"params are on {device}, which has no float64, and losses and counts are summed in it: move params and "
            "microbatches to the CPU"
        )


def _refuse_kind(path: str, leaf: Tensor) -> NoReturn:
    """Floating point tensors that look like any other, and are not."""
    if leaf.dtype not in tree.SUM_DTYPES:
        raise TypeError(
            f"{path} is {leaf.dtype}, in which neither gradients nor updates can be computed: keep params in "
            "bfloat16 or wider, and cast inside loss_fn"
        )
    raise TypeError(
        f"{path} is a {type(leaf).__name__}, which holds its values on several ranks or in several tensors: params are "
        "plain tensors. Of a DTensor, as fully_shard and distribute_tensor make them, pass leaf.full_tensor(), or "
        "ps.from_dtensor(params, axis), and say by axis=ps.MeshAxis(mesh, ...) where the tokens are spread"
    )


def checked_group(microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """The microbatches, refused where they are no sequence."""
    if not isinstance(microbatches, Sequence) or hasattr(microbatches, "_fields"):
        raise TypeError(
            f"microbatches must be a sequence of microbatches, got {type(microbatches).__name__}: "
            "cut a stacked batch with ps.split(batch, k), wrap a single microbatch in a list, and "
            "gather an iterator into one"
        )
    return microbatches
