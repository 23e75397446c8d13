"""Arguments of a step, refused with the way out.

Cheap comparisons run at every step. Deeper ones run at the first update with params of a structure:

* Can these be params? Do donated leaves share memory?
* Does the loss write to params? Does a checkpoint recompute with other ones?
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.axis import Axis, check_axis, is_subaxis, shares_ranks
from purestep.torch_private import version
from purestep.types import LossFn, Microbatch, OptState, Params, WeightFn

DONATED = "_donated_to_purestep"
"""An attribute of the first leaf of each tree that a step has consumed."""


def check_functions(loss_fn: LossFn, weight_fn: WeightFn | None, axis: Axis) -> None:
    """Refuses what is neither a function nor an axis."""
    check_callable("loss_fn", loss_fn)
    if isinstance(loss_fn, torch.nn.Module) and [*loss_fn.parameters()]:
        raise TypeError(
            f"loss_fn is a module, {type(loss_fn).__name__}: take params, apply = "
            "ps.from_module(module), and write loss_fn(params, microbatch), which calls "
            "apply(params, ...) and returns one loss per token"
        )
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
        choice = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{name}={value!r} must be one of {choice}")


def check_normalize(
    normalize: str, weight_fn: WeightFn | None, accum_dtype: torch.dtype | None
) -> None:
    """Refuses settings that do not go together, and dtypes that sums cannot be kept in."""
    if weight_fn is None and normalize == "loss":
        raise ValueError(
            'weight_fn=None means that the forward pass brings the weights, but normalize="loss" '
            'counts them before it: pass normalize="grads", or a weight_fn'
        )
    if accum_dtype is not None and accum_dtype not in tree.FLOAT_DTYPES:
        raise ValueError(
            f"{accum_dtype=} must be a floating point dtype for sums: one of "
            + ", ".join(map(str, tree.FLOAT_DTYPES))
        )


def check_inputs(
    params: Params,
    opt_state: OptState,
    microbatches: Sequence[Microbatch],
    axis: Axis,
    donate: bool,
) -> None:
    """Refuses what an update cannot take, at the first one with params of this structure."""
    check_params(params, axis)
    if donate and tree.is_plain_eager(params, opt_state):
        data = microbatches if isinstance(microbatches, list | tuple) else ()
        check_no_aliasing(params, opt_state, data)


def check_params(params: Params, axis: Axis) -> None:
    """Refuses params that cannot be differentiated, or that the axis does not fit."""
    leaves = tree.leaves(params)
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: take params, apply = "
            "ps.from_module(module), and call apply(params, ...) in loss_fn"
        )
    if not leaves:
        raise ValueError("params holds no tensors, so there is nothing to update")
    for position, leaf in enumerate(leaves):
        if (
            not isinstance(leaf, Tensor)
            or leaf.dtype not in tree.FLOAT_DTYPES
            or leaf.is_sparse
        ):
            _raise_not_a_param(_path_of(params, position), leaf)
        if hasattr(leaf, "__tensor_flatten__"):
            raise TypeError(
                f"{_path_of(params, position)} is a {type(leaf).__name__}, which "
                "holds its values on "
                "several ranks or in several tensors: params are plain tensors. Of a DTensor, as "
                "fully_shard and distribute_tensor make them, pass leaf.full_tensor(), or "
                "ps.from_dtensor(params, axis), and say by axis=ps.MeshAxis(mesh, ...) where the "
                "tokens are spread"
            )
        if leaf.device != leaves[0].device:
            raise ValueError(
                f"{_path_of(params, 0)} is on {leaves[0].device}, but "
                f"{_path_of(params, position)} is on "
                f"{leaf.device}: the params of a step are on one device; move them there"
            )
    _check_shards(params, leaves, axis)


def check_no_graph(params: Params, axis: Axis) -> None:
    """Refuses new params that depend on a learning rate, each rank's piece in another way."""
    if tree.any_requires_grad(params):
        raise ValueError(
            f"a step over {axis} is not recorded, but the new params require grad, as where a "
            "learning rate does: detach it, or differentiate through the step with ps.VmapAxis"
        )


def check_no_grad_leaves(params: Params, leaves: Sequence[Any]) -> None:
    """Refuses leaves of autograd that require grad: their graph would grow from step to step."""
    is_plain = tree.is_plain_eager()
    for position, leaf in enumerate(leaves):
        # Under a transform, its own variables look like leaves.
        is_graphless = isinstance(leaf, torch.nn.Parameter) or (
            is_plain and leaf.is_leaf
        )
        if leaf.requires_grad and is_graphless:
            raise TypeError(
                f"{_path_of(params, position)} requires grad and was computed from nothing, as an "
                "nn.Parameter: each step would be recorded behind the one before. Take params, "
                "apply = ps.from_module(module), or p.detach() of each; and p.clone() where you "
                "differentiate through steps"
            )


def reused_donation_error(name: str) -> ValueError:
    """The error for a tree that an earlier step has consumed."""
    return ValueError(
        f"{name} was donated to an earlier step, which wrote the new values over it: go on with "
        "what that step returned, or keep a copy, tree.map(torch.clone, params)"
    )


def mark_donated(leaf: Tensor) -> None:
    """Marks a leaf whose memory belongs to what a step has returned."""
    leaf.__dict__[DONATED] = True


def no_dependence_error() -> ValueError:
    """The error for losses that no param leads to."""
    return ValueError(
        "loss_fn gives losses that do not depend on params: no gradient reaches any of their "
        "leaves. Perhaps it calls a module itself instead of what ps.from_module(module) or "
        "torch.func.functional_call make of it, detaches what it returns, or computes under "
        "torch.no_grad(); or all of it runs under torch.inference_mode(), which records nothing"
    )


def _raise_not_a_param(path: str, leaf: Any) -> NoReturn:
    found = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
    raise TypeError(
        f"{path} is {found}: params are dense tensors in bfloat16 or wider, in containers that "
        "optree knows. Cast inside loss_fn, keep other data in the microbatch or close over it, "
        "and register classes of your own in purestep.tree.NAMESPACE"
    )


def _check_shards(params: Params, leaves: Sequence[Tensor], axis: Axis) -> None:
    """Refuses pieces of a wrong shape, or over an axis that shares some ranks with the step's."""
    places = tree.shard_specs(tree.flatten(params)[1])
    for position, place in enumerate(places):
        if place is None:
            continue
        if shares_ranks(place.axis, axis) and not is_subaxis(place.axis, axis):
            raise ValueError(
                f"{_path_of(params, position)} is sharded over {place.axis}, some of "
                "whose ranks are "
                f"of {axis}, over which this step is: shard it over that axis itself, over some of "
                "its dimensions, or over an axis whose ranks hold the same tokens, as in tensor "
                "parallelism"
            )
        place.check(_path_of(params, position), leaves[position])


def check_no_aliasing(
    params: Params, opt_state: OptState, microbatches: Sequence[Microbatch] = ()
) -> None:
    """Refuses donated leaves that share a storage with each other, or with a microbatch."""
    owners: dict[torch.UntypedStorage, str] = {}
    for name, leaf in _name_of((params, opt_state), "(params, opt_state)"):
        if leaf.numel() * leaf.element_size() > leaf.untyped_storage().nbytes():
            raise ValueError(
                f"donate=True needs memory for each element, but {name} overlaps itself, as expand "
                "makes it: clone it"
            )
        _raise_aliased(owners, name, leaf)
        owners[leaf.untyped_storage()] = name
    for name, leaf in _name_of(tree.mappings_to_dicts([*microbatches]), "microbatches"):
        _raise_aliased(owners, name, leaf)


def _raise_aliased(
    owners: dict[torch.UntypedStorage, str], name: str, leaf: Tensor
) -> None:
    if leaf.numel() and leaf.untyped_storage() in owners:
        raise ValueError(
            f"donate=True writes over {owners[leaf.untyped_storage()]}, but {name} shares its "
            "memory: clone one of them, or tie them inside loss_fn"
        )


def _name_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Each strided tensor of a tree, by its path."""
    for path, leaf in zip(tree.paths(value, name), tree.leaves(value), strict=True):
        if (
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and not leaf.is_nested
        ):
            yield path, leaf


def _path_of(params: Params, position: int) -> str:
    return tree.paths(params, "params")[position]


def version_counters(leaves: Sequence[Tensor]) -> list[int]:
    """Returns how often each leaf was written to; nothing where torch does not count.

    It does not under inference mode, and what a transform or a compiler sees has no versions.
    """
    if not tree.is_plain_eager() or any(leaf.is_inference() for leaf in leaves):
        return []
    return [version(leaf) for leaf in leaves]


def check_not_mutated(
    params: Params, leaves: Sequence[Tensor], versions: Sequence[int]
) -> None:
    """Refuses a loss that has written to params since they had these versions."""
    for position, before in enumerate(versions):
        if version(leaves[position]) != before:
            raise ValueError(
                f"loss_fn wrote to {_path_of(params, position)} in place, which is the caller's: "
                "compute a new tensor, or give a module that updates its buffers a clone of them"
            )


def reachable_leaves(terms: Sequence[Tensor]) -> list[Tensor]:
    """The leaves by which autograd can differentiate these terms.

    Refuses reentrant checkpoints, whose own backward pass may reach params that this one skips.
    torch refuses those that it runs, but not one behind an input that no param leads to.

    >>> w = torch.ones((), requires_grad=True)
    >>> reachable_leaves([3 * w])[0] is w
    True
    """
    nodes, seen = [term.grad_fn for term in terms], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
            if node.name() == "CheckpointFunctionBackward":
                raise ValueError(
                    "loss_fn runs a reentrant checkpoint, in which a step sees no gradients: pass "
                    "use_reentrant=False, or to models of transformers "
                    'gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
    return [node.variable for node in seen if hasattr(node, "variable")]


def warn_of_constants(leaves: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Warns if a loss computes with the parameters of which params are copies.

    It does so beside ``apply(params, ...)``, as by a penalty over ``module.parameters()``. They are
    constants to a step, so the penalty has no gradient.
    """
    own = {*map(id, params)}
    others = [
        x for x in leaves if isinstance(x, torch.nn.Parameter) and id(x) not in own
    ]
    if own.isdisjoint(map(id, leaves)):
        return  # A loss that reaches no param at all is an error.
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for p in params if others else ():
        by_shape.setdefault(p.shape, []).append(p)
    copied = [
        x
        for x in others
        if any(_is_same_tensor(x, p) for p in by_shape.get(x.shape, ()))
    ]
    if copied:
        warnings.warn(
            f"loss_fn computes with parameters of a module beside params ({len(copied)}), their "
            f"copies, such as one of shape {tuple(copied[0].shape)}: to a step they are constants, "
            "without a gradient. A penalty is over params.values(); what is meant to be constant "
            "says so by detach()",
            stacklevel=2,
        )


def _is_same_tensor(x: Tensor, p: Tensor) -> bool:
    """Whether the host sees equal values, which are not zeros or ones as in any new layer."""
    if not (x.is_cpu and p.is_cpu and x.numel() and x.dtype == p.dtype):
        return False
    return torch.equal(x, p) and bool(x.min() != x.max())


class forbid_module_recompute(TorchFunctionMode):  # noqa: N801
    """A context in which no checkpoint may recompute with a module's own parameters.

    ``torch.func.functional_call`` gives a module its own parameters back before the backward pass
    begins. A checkpoint inside of it computes with those again. Recomputation is what calls torch
    with gradients enabled.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._leaves = {*map(Tensor.untyped_storage, leaves)}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            for value in tree.leaves((args, kwargs)):
                if isinstance(value, torch.nn.Parameter) and (
                    value.untyped_storage() not in self._leaves
                ):
                    raise ValueError(
                        "a checkpoint inside loss_fn recomputes with a module's own parameter, of "
                        f"shape {tuple(value.shape)}: inside of torch.func.functional_call that is "
                        "not the one of the forward pass. Take params, apply = "
                        "ps.from_module(module), and call apply(params, ...) instead"
                    )
        return func(*args, **(kwargs or {}))
