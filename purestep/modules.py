"""An ``nn.Module`` as a pure function of its parameters.

Each call runs on a skeleton of its own: the module's objects made anew, with all that refers to them, around the same
tensors. Nothing is swapped into the module and back. So threads do not meet, and what a checkpoint computes again in the
backward pass finds the parameters of its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from purestep import skeleton, tree
from purestep.keyed import keyed
from purestep.random import Keys
from purestep.torch_internals import (
    accumulate_hooks,
    adds_its_masks,
    asked_once,
    gradient_hooks,
    holds_tensors,
    hooks_backward,
    is_deferred,
    is_of_transformers,
    never_compiled_alone,
    storage_address,
    traced_versions,
    traced_writes,
    values_inside,
    version,
)


def from_module(
    module: Module, *, trainable: str | Callable[[str, Parameter], bool] | None = None
) -> tuple[dict[str, Tensor], Apply]:
    """What trains of a module, and the module as a pure function of it: ``params, apply = from_module(module)``.

    Args:
        module: as it is now: ``apply`` does not see later changes of its mode, hooks and attributes, only
            of values that are written in place. Neither it nor any ``.grad`` is ever changed.
        trainable: which parameters train: a pattern of names (``"*.bias"``), or a function of name and parameter.
            None: those that require grad, which is what LoRA needs. A tied one matches by any of its names.

    Returns:
        ``params``, copies of these by name, each tied one once, and ``apply(params, *args, **kwargs)``. All other
        parameters and all buffers are constants, and not copied. ``apply.eval`` is the same function of the module
        in evaluation mode: for ``make_eval_step``.

    **Buffers.** ``apply(params, *args, buffers=buffers)`` returns ``(output, buffers)``, the latter as the call has left
    them. A module that writes to its buffers needs that, as BatchNorm does in training mode; ``dict(module.named_buffers())``
    is the start. In a step, put them into each microbatch and return the new ones, and a 1, as
    ``LossTerms(aux=(buffers, torch.tensor(1)))``: the quotient of both sums is the mean over microbatches, those of padding alone
    included.

    **Checkpoints** (``use_reentrant=False``) compute again with the params of their call, whatever ``apply`` is called with
    before the backward pass. ``torch.func`` knows no checkpoints, and a step refuses reentrant ones.

    **Dropout** in training mode draws from torch's global generator, as in every module. ``apply(params, *args, key=keys)`` draws from keys
    instead, of shape ``(rows,)``, one for each example along the first dimension (``ps.random.with_keys``); or from ``ps.random.token_keys``, where a row
    holds several examples. Each example's noise is its own then: it depends neither on the cut, nor on padding, order or neighbours. This
    holds for all of ``torch.nn.functional``'s kinds of dropout, attention's included; whatever else draws is refused by name. The n-th
    dropout of a call draws from ``ps.random.fold_in(keys, n)``, and so does what a checkpoint computes again.

    >>> params, apply = from_module(torch.nn.Linear(2, 1))
    >>> {name: tuple(p.shape) for name, p in params.items()}
    {'weight': (1, 2), 'bias': (1,)}
    >>> apply({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.zeros(1)}, torch.ones(2))
    tensor([5.])
    """
    _check_module(module)
    named = [*module.named_parameters(remove_duplicate=False)]
    if not (trainable is None or isinstance(trainable, str) or callable(trainable)):
        raise TypeError(
            f"{trainable=} must be a pattern of names, such as '*.bias', a function of name and parameter, or None"
        )
    if isinstance(trainable, str):
        chosen = {id(p) for name, p in named if fnmatchcase(name, trainable)}
    else:
        chosen = {id(p) for name, p in named if (trainable or _requires_grad)(name, p)}
    params = {name: p for name, p in module.named_parameters() if id(p) in chosen}
    _check_params(module, params)
    if not params:
        raise ValueError(
            f"{trainable=} leaves nothing to train of {type(module).__name__}, whose parameters are "
            f"{_listed(name for name, _ in named)}: choose some by name, or let some require grad"
        )
    return {name: p.detach().clone() for name, p in params.items()}, Apply(module, params)


def to_module(params: Mapping[str, Tensor], module: Module) -> None:
    """Writes params into the module's parameters of the same names; its other parameters stay as they are.

    >>> module = torch.nn.Linear(1, 1)
    >>> to_module({"bias": torch.tensor([3.0])}, module)
    >>> module.bias.item()
    3.0
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    _check_names("params", params, own, ())
    for name, value in params.items():
        if tree.kind(value) != tree.kind(own[name]):
            raise ValueError(
                f"params[{name!r}] is {tree.kind(value)}, and {type(module).__name__}.{name} is {tree.kind(own[name])}: "
                "write back what from_module gave, of this module or of one like it"
            )
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)


class Apply:
    """``apply(params, *args, **kwargs)``: what ``from_module`` makes of a module."""

    eval: Apply
    """The same of the module in evaluation mode."""

    def __init__(self, module: Module, params: Mapping[str, Tensor], training: bool = True) -> None:
        self._names, self._buffers = dict.fromkeys(params), dict(module.named_buffers())
        own, held = skeleton.own_tensors(module), [*self._buffers.values()]
        self._own = {name: each.detach() for name, each in own.items()}
        inputs = [*params.values(), *held, *own.values()]
        self._plan = skeleton.plan(module, inputs, training)
        self._tried = False
        self._hooks_backward = hooks_backward(module)
        # A compiler makes no objects: one skeleton is there before it begins, and has places for tensors, but none.
        self._blank = [*[torch.empty_like(p, device="meta") for p in params.values()], *held]
        values = skeleton.values(self._plan, [*self._blank, *self._own.values()])
        self._traced = values[self._plan.root]
        self._places = [
            (values[container], key, part)
            for container, key, part in self._plan.places
            if part < len(self._blank)
        ]
        modules = [each for each in values if isinstance(each, Module)]
        states = {id(vars(each)) for each in modules}
        first = len(inputs) + len(self._plan.constants)
        containers = values[first : first + len(self._plan.containers)]
        containers = [each for each in containers if id(each) not in states]
        self._models = [
            (position, (*inspect.signature(type(each).forward).parameters,)[1:])
            for position, each in enumerate(values)
            if isinstance(each, Module) and is_of_transformers(each)
        ]
        _check_calls([(values[position], names) for position, names in self._models])
        self._begun = [
            *[(each, dict(vars(each))) for each in modules],
            *[(each, each.copy()) for each in containers],
        ]
        for function in (Apply.__call__, Apply._call, _versions):
            never_compiled_alone(function)
        never_compiled_alone(_uncompiled, callees=False)
        self._written = [
            f"{name}.{buffer}".removeprefix(".")
            for name, each in self._traced.named_modules()
            if each.training and getattr(each, "track_running_stats", False)
            for buffer, _ in each.named_buffers(recurse=False)
        ]
        self.eval = Apply(module, params, training=False) if training else self

    def __call__(
        self,
        params: Mapping[str, Tensor],
        /,
        *args: Any,
        buffers: Mapping[str, Tensor] | None = None,
        key: Keys | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the module returns; with ``buffers``, ``(output, buffers)``. With ``key``, dropout draws from it."""
        given = {} if buffers is None else {name: value.clone() for name, value in buffers.items()}
        _check_names("params", params, self._names, self._names)
        _check_names("buffers", given, self._buffers, self._written)
        held = {**self._buffers, **given, **self._own}
        inputs = [*[params[name] for name in self._names], *held.values()]
        run = self._trace if torch.compiler.is_dynamo_compiling() else self._call
        if key is None:
            output, given = run(inputs, given, args, kwargs)
        else:
            _check_key(key)
            with keyed(key):
                output, given = run(inputs, given, args, kwargs)
        return output if buffers is None else (output, given)

    def _trace(
        self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        if self._hooks_backward:
            raise ValueError("a compiler leaves hooks on a module's backward pass out")
        self._fill(inputs)
        before = _versions_in_trace(self)
        output = self._traced(*args, **kwargs)
        self._check_written(before, _versions_in_trace(self))
        carried = _buffers(self._traced, given)
        # What a call has left behind must not be there in the next one.
        for position, attributes in _left_behind(self):
            thing, begun = self._begun[position]
            if isinstance(thing, Module):
                for name, was_there in attributes:
                    if was_there:
                        object.__setattr__(thing, name, begun[name])
                    else:
                        delattr(thing, name)
            else:
                thing.clear()
                thing.extend(begun) if isinstance(thing, list) else thing.update(begun)
        self._fill(self._blank)
        return output, carried

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        for container, key, part in self._places:
            container[key] = inputs[part]

    def _call(
        self, inputs: list[Tensor], given: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        kept = [*self._buffers.values(), *self._own.values()]
        if not self._tried:
            # The first call shows whether the module writes to its own tensors, and has copies of them.
            kept = [each.clone() for each in kept]
            own = zip([*self._buffers, *self._own], kept, strict=True)
            inputs[len(self._names) :] = [given.get(name, each) for name, each in own]
        before = _versions(kept)
        values = skeleton.values(self._plan, inputs)
        module = values[self._plan.root]
        if self._models:
            _check_calls([(values[position], names) for position, names in self._models])
        try:
            run = partial(_uncompiled, module) if self._hooks_backward else module
            output = run(*args, **kwargs)
        except RuntimeError as error:
            for words, way_out in _TRANSFORMS_REFUSE.items():
                if words in str(error):
                    raise ValueError(way_out) from error
            raise
        self._check_written(before, _versions(kept))
        self._tried = True
        return output, _buffers(module, given)

    def _check_written(self, before: Sequence[int], after: Sequence[int]) -> None:
        if before == after:
            return
        pairs = zip(before, after, strict=True)
        changed = [was != now for was, now in pairs]
        for name, now in zip([*self._buffers, *self._own], changed, strict=True):
            if now and name in self._own:
                raise ValueError(f"the module has written to its tensor {name}: {_OWN}")
            if now:
                raise ValueError(f"the module has written to its buffer {name}: {_BUFFERS}")


def _check_key(key: Keys) -> None:
    leaves = tree.leaves_of(key)
    if not all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in leaves):
        raise TypeError(
            f"key= are keys of ps.random, tensors of dtype int64, got {tree.kind(leaves[0])}: a module's own argument of that name "
            "is passed by position"
        )


def _uncompiled(module: Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to, where that is counted."""
    return [0 if each.is_inference() else version(each) for each in tensors]


@asked_once
def _versions_in_trace(apply: Apply) -> tuple[int, ...]:
    return traced_versions([*apply._buffers.values(), *apply._own.values()])


@asked_once
def _left_behind(apply: Apply) -> tuple[tuple[int, tuple[tuple[str, bool], ...]], ...]:
    """Which of the skeleton's modules and containers the traced call has changed, and which attributes, each with whether it was there."""
    return tuple(
        (position, tuple((name, name in apply._begun[position][1]) for name in names))
        for position, names in traced_writes([thing for thing, _ in apply._begun]).items()
    )


def _buffers(module: Module, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: module.get_buffer(name) for name in names}


_BUFFERS = (
    "buffers are constants, but for those that are given: with buffers=dict(module.named_buffers()), apply returns "
    "(output, buffers). Or take apply.eval, or call .eval() of what writes to them before from_module"
)

_OWN = (
    "apply would write to the module itself. Compute a new tensor and assign it, which each call forgets; or make it a buffer "
    "(register_buffer), and pass buffers=dict(module.named_buffers())"
)

_TRANSFORMS_REFUSE = {
    "saved tensor hooks": (
        "the module checkpoints activations, which torch.func knows nothing of: switch that off under its transforms "
        "(activation_checkpointing_disable() of a Hugging Face model, before from_module), or take a step that is not transformed"
    ),
    "Tensor.requires_grad_()": (
        "the module lets a tensor require grad, which torch.func refuses: remove the hook that does so before "
        "from_module, or take a step that is not transformed. A Hugging Face model has it where it checkpoints activations: "
        "activation_checkpointing_disable() and disable_input_require_grads()"
    ),
    "setup_context": (
        "the module has hooks on its backward pass (register_full_backward_hook), or an autograd.Function without setup_context, "
        "which torch.func does not run: remove them, or take a step that is not transformed"
    ),
    "data-dependent control flow": (
        "the module looks at values, which vmap hides. Those of Hugging Face look at masks of two dimensions and at "
        "position_ids without a mask: pass attention_mask=ps.segment_mask(attention_mask), or that of segments"
    ),
}


def _check_calls(models: Iterable[tuple[Module, tuple[str, ...]]]) -> None:
    """Lets each Hugging Face model look at what it is given, by the names of its arguments, and at what it returns."""
    depth = 0

    def before(module: Module, args: Any, kwargs: Any, names: tuple[str, ...]) -> None:
        nonlocal depth
        depth += 1
        _check_masks(module, {**dict(zip(names, args, strict=False)), **kwargs})

    def after(args: Any, kwargs: Any, output: Any, names: tuple[str, ...]) -> None:
        nonlocal depth
        depth -= 1
        # What a model gives to its own parts is its own business.
        if depth == 0:
            _check_cache(output, {**dict(zip(names, args, strict=False)), **kwargs})

    for model, names in models:
        model.register_forward_pre_hook(
            lambda module, args, kwargs, names=names: before(module, args, kwargs, names),
            with_kwargs=True,
        )
        model.register_forward_hook(
            lambda module, args, kwargs, output, names=names: after(args, kwargs, output, names),
            with_kwargs=True,
        )


def _check_masks(module: Module, given: Mapping[str, Any]) -> None:
    """Refuses a mask of bools where a Hugging Face model would add it to its scores, True for 1."""
    if not adds_its_masks(module):
        return
    for name, masks in given.items():
        if not name.endswith("attention_mask"):
            continue
        # One for each kind of layer, where there are several.
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            # Masks of two dimensions say what is padding, and the model itself makes of them what it adds.
            if isinstance(mask, Tensor) and mask.ndim > 2 and mask.dtype == torch.bool:
                raise ValueError(
                    f"{name} is {tree.kind(mask)}, which eager attention would add to its scores, True for 1: give one "
                    'to be added, as ps.segment_mask(segments, dtype) makes it, or set_attn_implementation("sdpa")'
                )


def _check_cache(output: Any, given: Mapping[str, Any]) -> None:
    """Refuses a cache that nobody asked for where a Hugging Face model is given positions.

    With a cache it no longer reads from positions where documents begin, and each attends to those before it.
    """
    if given.get("position_ids") is None or given.get("use_cache"):
        return
    if given.get("past_key_values") is not None:
        return
    filled = getattr(output, "past_key_values", None) is not None
    if isinstance(output, tuple):
        filled = any(hasattr(each, "get_seq_length") for each in output)
    if filled:
        raise ValueError(
            "the model has filled a cache, and so takes packed documents for one text whatever position_ids say: pass "
            "use_cache=False, or set model.config.use_cache = False before from_module"
        )


def _requires_grad(name: str, parameter: Parameter) -> bool:
    return parameter.requires_grad


def _listed(names: Iterable[str]) -> str:
    first, *others = [*names] or ["none"]
    return ", ".join([first, *others[:4], *(["..."] if others[4:] else [])])


def _check_names(
    what: str, given: Mapping[str, Any], known: Collection[str], needed: Collection[str]
) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in known]
    if unknown or missing:
        way_out = (
            _BUFFERS if what == "buffers" else "pass what from_module gave, all of it and no more"
        )
        raise ValueError(
            f"{what} lacks {_listed(missing)}, and has no place for {_listed(unknown)}: {way_out}"
        )


_WRAPPERS = {
    "DistributedDataParallel": "pass module.module, and let a step with ps.MeshAxis sum over ranks",
    "FullyShardedDataParallel": "pass a module that is not sharded, and let a step with ps.MeshAxis sum over ranks",
    "FSDPModule": "pass a module that fully_shard has not changed, and let a step with ps.MeshAxis sum over ranks",
    "DataParallel": "pass module.module",
    "OptimizedModule": "pass the module itself, and say compile=True of the step",
    "ScriptModule": "pass the module that it was made of",
}


def _check_module(module: Module) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"from_module takes an nn.Module, got {type(module).__name__}")
    for name, each in module.named_modules():
        for wrapper in {base.__name__ for base in type(each).__mro__} & _WRAPPERS.keys():
            path = f"{type(module).__name__}.{name}".removesuffix(".")
            raise TypeError(f"{path} is a {wrapper}, no plain module: {_WRAPPERS[wrapper]}")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: call the module once before from_module")
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the device meta, without values: load or initialise it before from_module"
            )
    found = skeleton.global_name(module)
    if found is not None:
        function, name = found
        raise TypeError(
            f"{function}, which {type(module).__name__} runs, refers to it or a part of it by the global name {name}, and so "
            "would go on using the module's own parameters: take it from the hook's own arguments, close over it, or "
            "hold it in an attribute"
        )


def _check_params(module: Module, params: Mapping[str, Parameter]) -> None:
    for name, p in params.items():
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(
                f"trainable= chooses {name}, which is {tree.kind(p)} and has no gradient: leave it out, with trainable=lambda "
                "name, p: p.is_floating_point(), say"
            )
        if gradient_hooks(p) or accumulate_hooks(p):
            raise TypeError(
                f"{name} has a hook on its gradient, which apply would leave out: remove it, and do the same to the "
                "sum of the gradients, with a Transform before the optimizer (ps.optim.chain)"
            )
    names = {id(p): name for name, p in params.items()}
    others = {id(each): name for name, each in skeleton.own_tensors(module).items()}
    others |= {id(each): name for name, each in module.named_buffers()}
    others |= {id(each): name for name, each in module.named_parameters()}
    spans = sorted(
        (*span(thing)[0], key)
        for key, (thing, _) in skeleton.reached(module).items()
        if isinstance(thing, Tensor) and not holds_tensors(thing) and span(thing)
    )
    # Of those that begin before, the one that reaches farthest: of all tensors, and of those that train.
    last, last_trained = (0, 0), (0, 0)
    for start, stop, key in spans:
        before, other = last if key in names else last_trained
        if start < before:
            one, two = (key, other) if key in names else (other, key)
            raise ValueError(
                f"{names[one]}, which trains, shares memory with {others.get(two, 'a tensor that the module holds')}, which "
                "would not see what it becomes: let both be one Parameter (a.weight = b.weight), or compute the one of "
                "the other in forward"
            )
        last = max(last, (stop, key))
        if key in names:
            last_trained = max(last_trained, (stop, key))


Span: TypeAlias = tuple[int, int]
"""From which byte to which a leaf reaches."""


def span(leaf: Any) -> list[Span]:
    """The bytes from the first to the last of a leaf, twice where its elements overlap."""
    if not isinstance(leaf, Tensor):
        return []
    if leaf.layout is not torch.strided or leaf.is_nested:
        return span(values_inside(leaf))
    if is_deferred(leaf):  # without addresses, a storage counts as one byte
        storage = storage_address(leaf.untyped_storage())
        return [(storage, storage + 1)]
    start, size = leaf.data_ptr(), leaf.nbytes
    if not (start and size):
        return []
    if leaf.is_contiguous():
        return [(start, start + size)]
    reach, folded = 0, False
    for stride, length in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        # Rows that are as far apart as they reach cannot meet. Others may, and then an element is written twice.
        folded = folded or (length > 1 and stride <= reach)
        reach += (length - 1) * stride
    return [(start, start + (1 + reach) * leaf.element_size())] * (1 + folded)
