"""Checks the arguments of a step. Each error names the way out.

Cheap checks run at every step. Others run at the first update with params of a structure:

* Can these be params? Do donated leaves share memory?
* Does the loss write to params? Does a checkpoint recompute with other ones?
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.axis import Axis, check_axis, is_subaxis, shares_ranks
from purestep.torch_private import version_counter
from purestep.tree.traced import TracedSpec
from purestep.types import LossFn, Microbatch, OptState, Params, Tree, WeightFn

DONATED = "_donated_to_purestep"
"""The attribute that marks the first leaf of a donated tree."""

LEAF_OF_STEP = "_leaf_of_purestep"
"""The attribute of each leaf that a step makes to differentiate one microbatch."""


def check_functions(loss_fn: LossFn, weight_fn: WeightFn | None, axis: Axis) -> None:
    """Raises TypeError if ``loss_fn`` is not callable, or ``axis`` is not an axis.

    A ``weight_fn`` must be callable or None. A ``loss_fn`` that is a module with parameters
    raises, too.
    """
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
    """Raises TypeError, with this name, if a value cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError, with this name, if a value is not one of the choices, a ``Literal``."""
    if value not in get_args(choices):
        text = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{name}={value!r} must be one of {text}")


def check_normalize(
    normalize: str, weight_fn: WeightFn | None, accum_dtype: torch.dtype | None
) -> None:
    """Raises ValueError if ``normalize="loss"`` has no ``weight_fn``.

    Also raises as ``check_accum_dtype``.
    """
    if weight_fn is None and normalize == "loss":
        raise ValueError(
            "weight_fn=None means that loss_fn returns the weights. To count every token alike, "
            'pass weight_fn=lambda m: torch.ones_like(m["y"]), one weight for each loss. If only '
            "the forward pass has the weights, return LossOutput(losses, weights=), and pass "
            'normalize="grads"'
        )
    check_accum_dtype(accum_dtype)


def check_accum_dtype(accum_dtype: torch.dtype | None) -> None:
    """Raises ValueError if ``accum_dtype`` is not None, and none of ``FLOAT_DTYPES``."""
    if accum_dtype is not None and accum_dtype not in tree.FLOAT_DTYPES:
        choices = ", ".join(str(dtype) for dtype in tree.FLOAT_DTYPES)
        raise ValueError(
            f"{accum_dtype=} must be a floating point dtype for sums: one of {choices}"
        )


def check_inputs(
    params: Params,
    opt_state: OptState,
    microbatches: Sequence[Microbatch],
    axis: Axis,
    donate: bool,
) -> None:
    """Raises if a step cannot take these params, or if donated leaves share memory.

    The errors are those of ``check_params`` and ``check_no_aliasing``. Memory is checked only with
    ``donate``, and not where a compiler, a transform or autograd follows these trees. Nor may
    microbatches in a list or tuple share memory with donated leaves; others are not checked.
    """
    check_params(params, axis)
    if donate and tree.is_plain_eager(params, opt_state):
        data = microbatches if isinstance(microbatches, list | tuple) else ()
        check_no_aliasing(params, opt_state, data)


def check_params(params: Params, axis: Axis) -> None:
    """Raises unless params are strided tensors of ``FLOAT_DTYPES`` on one device.

    TypeError is for a module, a DTensor, and other leaves that cannot be params. Other subclasses
    of ``Tensor``, without ``__tensor_flatten__``, pass. ValueError is for a tree without leaves, a
    meta tensor, and several devices. It is also for shards of a wrong shape, or over an axis that
    does not fit the step's ``axis``.
    """
    leaves = tree.leaves(params)
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: take params, apply = "
            "ps.from_module(module), and call apply(params, ...) in loss_fn"
        )
    if not leaves:
        raise ValueError("params holds no tensors, so there is nothing to update")
    for position, leaf in enumerate(leaves):
        if not _can_be_param(leaf):
            _raise_not_a_param(_path_of(params, position), leaf)
        if hasattr(leaf, "__tensor_flatten__"):
            raise TypeError(
                f"{_path_of(params, position)} is a {type(leaf).__name__}, which holds its values "
                "on several ranks or in several tensors: params are plain tensors. Of a DTensor, "
                "as fully_shard and distribute_tensor make them, pass leaf.full_tensor(), or "
                "ps.from_dtensor(params, axis), and say by axis=ps.MeshAxis(mesh, ...) where the "
                "tokens are spread"
            )
        if leaf.is_meta:
            raise ValueError(
                f"{_path_of(params, position)} has no values on the meta device: load them, as by "
                "ps.checkpoint.load_safetensors(path, like=params)"
            )
        if leaf.device != leaves[0].device:
            raise ValueError(
                f"{_path_of(params, 0)} is on {leaves[0].device}, but {_path_of(params, position)} "
                f"is on {leaf.device}: the params of a step are on one device; move them there"
            )
    _check_shards(params, leaves, axis)


def _can_be_param(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested:
        return False
    return leaf.dtype in tree.FLOAT_DTYPES


def check_no_graph(params: Params, axis: Axis) -> None:
    """Raises ValueError, which names ``axis``, if the new params of a step over it require grad.

    They do where a learning rate does. No rank would see the whole graph.
    """
    if tree.any_requires_grad(params):
        raise ValueError(
            f"a step over {axis} is not recorded, but the new params require grad, as where a "
            "learning rate does: detach it, or differentiate through the step with ps.VmapAxis"
        )


def check_no_grad_leaves(leaves: Sequence[Any], spec: tree.TreeSpec) -> None:
    """Raises TypeError if a leaf requires grad and was computed from nothing, as a parameter.

    Its graph would grow with each step. In a transform or a compiler, only an ``nn.Parameter`` is
    known to be computed from nothing. The leaves that another step makes, around this one, pass
    there. ``spec`` names the leaf in the error.
    """
    is_plain = tree.is_plain_eager()
    for position, leaf in enumerate(leaves):
        is_parameter = isinstance(leaf, torch.nn.Parameter) and not is_leaf_of_step(
            leaf
        )
        # Under a transform, its own variables look like leaves.
        is_graphless = is_parameter or (is_plain and leaf.is_leaf)
        if leaf.requires_grad and is_graphless:
            raise TypeError(
                f"{_path_in(spec, position)} requires grad and was computed from nothing, as an "
                "nn.Parameter: each step would be recorded behind the one before. Take params, "
                "apply = ps.from_module(module), or p.detach() of each; and p.clone() where you "
                "differentiate through steps"
            )


def reused_donation_error(name: str) -> ValueError:
    """Returns the ValueError for a tree, called ``name``, that was donated to an earlier step."""
    return ValueError(
        f"{name} was donated to an earlier step, which wrote the new values over it: go on with "
        "what that step returned, or keep a copy, tree.map(torch.clone, params)"
    )


def is_leaf_of_step(x: Any) -> bool:
    """Returns whether this is a leaf that a step has made for autograd's own pass.

    It is made for one microbatch. Leaves that ``torch.func`` or a compiler differentiates are not
    marked. ``apply`` makes marked leaves ``nn.Parameter`` to ``isinstance``.
    """
    return hasattr(x, LEAF_OF_STEP)


def mark_donated(leaf: Tensor) -> None:
    """Marks a leaf, by an attribute, as donated: its memory holds the new values."""
    leaf.__dict__[DONATED] = True


def wrong_length_error(
    microbatches: Sequence[Microbatch], more_or_fewer: str
) -> ValueError:
    """Returns the ValueError for a sequence that yields more or fewer items than its length."""
    return ValueError(
        f"microbatches yields {more_or_fewer} than the {len(microbatches)} microbatches of its "
        "length: return the number of microbatches from __len__"
    )


def no_dependence_error() -> ValueError:
    """Returns the ValueError for losses that do not depend on params."""
    return ValueError(
        "loss_fn gives losses that do not depend on params: no gradient reaches any of their "
        "leaves. Perhaps it calls a module itself instead of what ps.from_module(module) or "
        "torch.func.functional_call make of it, detaches what it returns, or computes under "
        "torch.no_grad(); or all of it runs under torch.inference_mode(), which records nothing"
    )


def _raise_not_a_param(path: str, leaf: Any) -> NoReturn:
    actual = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
    if isinstance(leaf, Tensor) and leaf.is_nested:
        actual = "a nested tensor"
    elif isinstance(leaf, Tensor) and leaf.layout != torch.strided:
        actual = f"of layout {leaf.layout}"
    if isinstance(leaf, Tensor) and leaf.is_complex():
        raise TypeError(
            f"{path} is {actual}: params are real floating-point tensors in bfloat16 or wider. "
            "Write it as two real parts, by torch.view_as_real, and back in loss_fn by "
            "torch.view_as_complex"
        )
    if isinstance(leaf, Tensor) and not leaf.is_floating_point():
        raise TypeError(
            f"{path} is {actual}: params are floating-point tensors in bfloat16 or wider. Make it "
            f"one before optimizer.init, as by {path}.float(), or keep it in the microbatch if it "
            "does not train"
        )
    raise TypeError(
        f"{path} is {actual}: params are dense tensors in bfloat16 or wider, in containers that "
        "optree knows. Cast inside loss_fn, keep other data in the microbatch or close over it, "
        "and register classes of your own in purestep.tree.NAMESPACE"
    )


def _check_shards(params: Params, leaves: Sequence[Tensor], axis: Axis) -> None:
    """Raises ValueError if a shard has a wrong shape, or is over an axis that the step cannot take.

    A shard's axis must be a subaxis of the step's, or have at most one rank in common with it. The
    axis of a ``Shard`` around another one must differ from the step's, and have at most one rank in
    common with it.
    """
    _, spec = tree.flatten(params)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs:
        return
    paths = tree.paths(params, "params")
    for position, shard_spec in enumerate(shard_specs):
        if shard_spec is None:
            continue
        path = paths[position]
        shard_axis = shard_spec.axis
        if shares_ranks(shard_axis, axis) and not is_subaxis(shard_axis, axis):
            raise ValueError(
                f"{path} is sharded over {shard_axis}, some of whose ranks "
                f"are of {axis}, over which this step is: shard it over that axis itself, over "
                "some of its dimensions, or over an axis whose ranks hold the same tokens, as in "
                "tensor parallelism"
            )
        for outer_axis in shard_spec.axes[1:]:
            if shares_ranks(outer_axis, axis):
                raise ValueError(
                    f"{path} is sharded over {outer_axis}, and inside of "
                    f"that over {shard_axis}, but this step is over {axis}: shard over the axis of "
                    "the step last, ps.shard(params, axis), and over it alone"
                )
        shard_spec.check(path, leaves[position])


def check_no_aliasing(
    params: Params, opt_state: OptState, microbatches: Sequence[Microbatch] = ()
) -> None:
    """Raises ValueError if a donated leaf shares a storage with another one, or with a microbatch.

    Also raises if two elements of a leaf share memory, as ``expand`` makes them. A leaf without
    elements shares nothing. Only strided tensors are compared; in microbatches those in mappings,
    too.
    """
    owners: dict[torch.UntypedStorage, str] = {}
    for name, leaf in _tensors_by_path((params, opt_state), "(params, opt_state)"):
        if overlaps_itself(leaf):
            raise ValueError(
                f"donate=True needs memory for each element, but {name} overlaps itself, as expand "
                "makes it: clone it"
            )
        _check_unaliased(owners, name, leaf)
        if leaf.numel():
            owners[leaf.untyped_storage()] = name
    data = tree.mappings_to_dicts([*microbatches])
    for name, leaf in _tensors_by_path(data, "microbatches"):
        _check_unaliased(owners, name, leaf)


def check_distinct(
    leaves: Sequence[Tensor], params: Params, opt_state: OptState
) -> None:
    """Raises as ``check_no_aliasing`` does if one tensor is two of the donated ``leaves``.

    ``leaves`` are those of both trees, which name a leaf in the error. Each update calls it, and
    only objects are compared. ``check_no_aliasing`` compares memory in the first update. A later
    update may make this mistake by ``params = opt_state.average``.
    """
    identities = {id(leaf) for leaf in leaves}
    if len(identities) < len(leaves):
        check_no_aliasing(params, opt_state)


def overlaps_itself(tensor: Tensor) -> bool:
    """Returns whether two elements of a strided tensor share memory.

    >>> windows = torch.ones(5).as_strided((2, 2), (2, 2))
    >>> overlaps_itself(windows), overlaps_itself(torch.ones(2, 2).T)
    (True, False)
    """
    reach = 0
    may_overlap = False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            may_overlap = True  # Else each step is beyond all smaller ones.
        reach += (size - 1) * stride
    if not may_overlap or not tensor.numel():
        return False
    if tensor.numel() > memory_span(tensor):
        return True
    positions = torch.arange(memory_span(tensor), device="cpu")
    used = positions.as_strided(tensor.shape, tensor.stride()).unique()
    return len(used) < tensor.numel()


def memory_span(tensor: Tensor) -> int:
    """Returns how many elements of memory lie from the first to the last of a tensor.

    >>> column, repeated = torch.ones(4, 3)[:, 0], torch.ones(1).expand(5)
    >>> memory_span(column), memory_span(repeated), memory_span(torch.ones(2, 0))
    (10, 1, 0)
    """
    if tensor.numel() == 0:
        return 0
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (size - 1) * stride
    return span


def _check_unaliased(
    owners: dict[torch.UntypedStorage, str], name: str, leaf: Tensor
) -> None:
    if leaf.numel() and leaf.untyped_storage() in owners:
        raise ValueError(
            f"donate=True writes over {owners[leaf.untyped_storage()]}, but {name} shares its "
            "memory: clone one of them, or tie them inside loss_fn"
        )


def _tensors_by_path(value: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields path and tensor of each strided leaf, and leaves out all others.

    Nested and sparse tensors have several storages.
    """
    paths = tree.paths(value, name)
    for path, leaf in zip(paths, tree.leaves(value), strict=True):
        if not isinstance(leaf, Tensor) or leaf.is_nested:
            continue
        if leaf.layout is torch.strided:
            yield path, leaf


def _path_of(params: Params, position: int) -> str:
    return tree.paths(params, "params")[position]


def _path_in(spec: tree.TreeSpec, position: int) -> str:
    if isinstance(spec, TracedSpec):
        return f"leaf {position} of params"  # optree has no paths in a trace.
    # Not by a tree of numbers, which a node class of the user's may refuse to hold.
    path: str = spec.accessors()[position].codify("params")
    return path


@contextmanager
def forbid_writes(leaves: Sequence[Tensor], spec: tree.TreeSpec) -> Iterator[None]:
    """Raises ValueError at the end of the context if one of ``leaves``, the params, was written to.

    ``spec`` names the leaf in the error. It checks nothing in a transform, a compiler or forward
    mode, nor if any leaf is a tensor of inference mode: these have no versions. Nor does it see
    writes by ``.data`` or NumPy, which count no version.
    """
    versions: list[int] = []
    if tree.is_plain_eager() and not any(leaf.is_inference() for leaf in leaves):
        versions = [version_counter(leaf) for leaf in leaves]
    yield
    for position, before in enumerate(versions):
        if version_counter(leaves[position]) != before:
            raise ValueError(
                f"loss_fn wrote to {_path_in(spec, position)} in place, which is the caller's: "
                "compute a new tensor, and pass {**params, name: tensor} to apply; or give a "
                "module that updates its buffers a clone of them"
            )


def reachable_leaves(terms: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaves of autograd in the graphs of these terms, in any order.

    A term that is a leaf itself has no graph. Raises ValueError as ``reachable_nodes``.

    >>> w = torch.ones((), requires_grad=True)
    >>> reachable_leaves([3 * w])[0] is w
    True
    """
    return leaves_of_nodes(reachable_nodes(terms))


def leaves_of_nodes(nodes: set[Any]) -> list[Tensor]:
    """Returns the leaves to which nodes of autograd add gradients, in any order."""
    # Not by the attribute: the node of an ``autograd.Function`` is its ctx, which may have any.
    return [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]


def reachable_nodes(terms: Sequence[Tensor]) -> set[Any]:
    """Returns the nodes of autograd in the graphs of these terms.

    Raises ValueError for reentrant checkpoints, whose backward pass may reach params that the outer
    one skips. torch raises only for a checkpoint that the backward pass runs. It skips one whose
    inputs depend on no param, without an error.
    """
    nodes = [term.grad_fn for term in terms]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "loss_fn runs a reentrant checkpoint, in which a step sees no gradients: pass "
                "use_reentrant=False, or to models of transformers "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
    return seen


def warn_of_probabilities(nodes: set[Any]) -> None:
    """Warns if these nodes have a softmax before a cross entropy, or a sigmoid before a binary one.

    The binary one is ``binary_cross_entropy_with_logits``: a sigmoid before
    ``binary_cross_entropy`` is right. Clones, casts, most views and most indexing between them are
    passed over, but not ``copy_``, ``expand``, ``split`` or ``unbind``. A log-softmax before a
    cross entropy changes nothing, and does not warn. Nor does a softmax that no loss of labels
    reads, as in an entropy. A cross entropy whose targets are probabilities is not checked.
    """
    for node in nodes:
        name = node.name()
        if name.startswith("NllLoss"):
            reader = _source_of(node)
            # After a plain log, softmax is right: nll_loss(log(softmax(x)), labels).
            if reader is not None and not reader.name().startswith("LogSoftmax"):
                reader = None
            squashing = "softmax"
        elif name == "BinaryCrossEntropyWithLogitsBackward0":
            reader = node
            squashing = "sigmoid"
        else:
            continue
        source = None if reader is None else _source_of(reader)
        if source is not None and source.name() == _SQUASHING[squashing]:
            warnings.warn(
                "a cross entropy takes logits, but gets the result of a "
                f"{squashing}, so the loss cannot come near 0: leave the {squashing} out of the "
                "model, and take it where you predict",
                stacklevel=2,
            )
            return


def _source_of(node: Any) -> Any:
    """Returns the node that computes the values of a node's first input; None if there is none.

    It passes over clones, casts, most views and most indexing of these values: all nodes that
    ``_PASSES_VALUES`` finds. ``expand``, ``split`` and ``index_select`` are not among them.
    """
    source = node.next_functions[0][0]
    while source is not None and _PASSES_VALUES.match(source.name()):
        source = source.next_functions[0][0]
    return source


_SQUASHING = {"softmax": "SoftmaxBackward0", "sigmoid": "SigmoidBackward0"}
"""Functions that turn logits into probabilities, and the names of their autograd nodes."""

_PASSES_VALUES = re.compile(
    "(UnsafeView|View|ReshapeAlias|ToCopy|Clone|Transpose|T|Permute|Squeeze|Unsqueeze"
    r"|Slice|Select|Index)Backward\d"
)
"""Finds the names of nodes that neither compute nor mix values."""


def warn_of_constants(leaves: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Warns if a loss computes with a module's parameters, of which params are copies.

    ``leaves`` are those that the loss's graph reaches. A penalty over ``module.parameters()``
    beside ``apply(params, ...)`` is an example. To a step these are constants, so the penalty has
    no gradient. Copies are known by equal values that are not all one number, and on the host
    alone: on a device it does not warn. Nor does it if the loss reaches no param.
    """
    param_ids = {id(param) for param in params}
    if not any(id(leaf) in param_ids for leaf in leaves):
        return  # A loss that reaches no param at all is an error.
    constants = []
    for leaf in leaves:
        # The leaves of a step around this one look like a module's parameters.
        is_parameter = isinstance(leaf, torch.nn.Parameter) and not is_leaf_of_step(
            leaf
        )
        if is_parameter and id(leaf) not in param_ids:
            constants.append(leaf)
    if not constants:
        return
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for param in params:
        by_shape.setdefault(param.shape, []).append(param)
    copied = []
    for constant in constants:
        candidates = by_shape.get(constant.shape, [])
        if any(_is_same_tensor(constant, param) for param in candidates):
            copied.append(constant)
    if copied:
        warnings.warn(
            f"loss_fn computes with parameters of a module beside params ({len(copied)}), their "
            f"copies, such as one of shape {tuple(copied[0].shape)}: to a step they are constants, "
            "without a gradient. A penalty is over params.values(); what is meant to be constant "
            "says so by detach()",
            stacklevel=2,
        )


def _is_same_tensor(x: Tensor, p: Tensor) -> bool:
    """Returns whether two tensors on the host have one dtype and equal values.

    Returns False for one number repeated, for no elements, and for tensors on a device.
    """
    if not (x.is_cpu and p.is_cpu and x.numel() and x.dtype == p.dtype):
        return False
    return torch.equal(x, p) and bool(x.min() != x.max())


class forbid_module_recompute(TorchFunctionMode):  # noqa: N801
    """Raises ValueError if a checkpoint recomputes with module parameters, within this context.

    Parameters in the memory of ``leaves``, the params, may be used. It checks nothing in a trace.

    ``torch.func.functional_call`` restores the parameters of a module before the backward pass
    begins, so a checkpoint inside of it recomputes with those, not with params. The context
    takes each call of torch with gradients enabled for such recomputation. So it also raises for a
    parameter that a gradient hook or a ``torch.autograd.Function`` reads under
    ``torch.enable_grad()``.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._leaves = {leaf.untyped_storage() for leaf in leaves}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            for value in tree.leaves((args, kwargs)):
                if not isinstance(value, torch.nn.Parameter) or is_leaf_of_step(value):
                    continue
                storage = value.untyped_storage()
                # A compiler that begins to trace has stand-ins, whose memory is on "meta".
                if storage.device.type != "meta" and storage not in self._leaves:
                    raise ValueError(
                        "a checkpoint inside loss_fn recomputes with a module's own parameter, of "
                        f"shape {tuple(value.shape)}: inside of torch.func.functional_call that is "
                        "not the one of the forward pass. Take params, apply = "
                        "ps.from_module(module), and call apply(params, ...) instead"
                    )
        return func(*args, **(kwargs or {}))
