"""An ``nn.Module`` as a pure function of its parameters.

    params, apply = from_module(module)        apply(params, x) = module(x), with params for its own

Each call runs on the module's objects made anew. So nothing is swapped into the module and back,
threads do not meet, and a checkpoint computes again with the params of its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from purestep import tree
from purestep.nn import dropout, first_call, huggingface, outside, rebuild, validation
from purestep.random import Keys
from purestep.torch_private import (
    check_no_rand_in_trace,
    hooks_backward,
    never_compiled_alone,
)

MAX_KINDS = 16
"""Kinds of calls that are checked, by their keywords, flags and texts."""


def from_module(
    module: Module, *, trainable: str | Callable[[str, Parameter], bool] | None = None
) -> tuple[dict[str, Tensor], Apply]:
    """Splits a module into the params that train and ``apply``, a pure function of them.

    Args:
        module: never changed. ``apply`` sees values that you later write in place, but no later
            change of mode, hooks or attributes.
        trainable: the parameters to train: a pattern of names (``"*.bias"``), or a function of name
            and parameter. None: those that require grad, as LoRA needs. A tied one matches by any
            name.

    Returns:
        ``params``, a dict of copies, each tied parameter once; and
        ``apply(params, *args, **kwargs)``. Other parameters and all buffers are constants, which
        are not copied. ``apply.eval`` runs the module in evaluation mode, for ``make_eval_step``.

    **Buffers.** ``apply(params, *args, buffers=buffers)`` returns ``(output, buffers)``, with the
    buffers after the call. A module that writes to its buffers in training, such as BatchNorm,
    needs this. ``apply.eval`` and ``to_module`` of BatchNorm need ``buffers`` too. Start with
    ``dict(module.named_buffers())``.

    **Checks.** The first call checks the module. So do the first calls with other ``buffers``, with
    ``key``, with other keywords or flags, and under ``no_grad``. A call is refused if it
    writes to a tensor of the module or of params, or assigns to a buffer. It is also refused if it
    computes with a parameter of the module instead of params.
    There is no check under a compiler: call ``apply`` once without it. Each call makes the objects
    that refer to the module anew, also in keys and sets. Closures are shared. Where a hook fills a
    dict by layer, its keys stay the module's layers. Methods that were compiled before, as by
    ``module.compile()``, run uncompiled: compile the step instead.

    **Checkpoints** with ``use_reentrant=False`` recompute with the params of their call.
    ``torch.func`` does not support checkpoints, and a step refuses reentrant ones.

    **Dropout** draws from torch's global generator. With ``apply(params, *args, key=keys)`` it
    draws from keys of shape ``(rows,)``, one for each example along the first dimension.
    ``ps.random.with_keys`` makes them. Where a row holds several examples, or the module flattens
    rows and tokens, pass ``ps.random.token_keys``. Then an example's noise depends on its key
    alone, not on the cut, padding, order or neighbours. This covers all kinds of dropout in
    ``torch.nn.functional``, attention's included. DropPath and StochasticDepth draw one number for
    each example. The first call refuses other draws by name.

    >>> params, apply = from_module(torch.nn.Linear(2, 1))
    >>> {name: tuple(p.shape) for name, p in params.items()}
    {'weight': (1, 2), 'bias': (1,)}
    >>> apply({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.zeros(1)}, torch.ones(2))
    tensor([5.])
    """
    validation.check_module(module)
    choose: Any = trainable
    if trainable is None:
        choose = lambda name, p: p.requires_grad  # noqa: E731
    elif isinstance(trainable, str):
        choose = lambda name, p: fnmatchcase(name, trainable)  # noqa: E731
    elif not callable(trainable):
        raise TypeError(
            f"{trainable=} must be a pattern of names, or a function of name and p"
        )
    named = dict(module.named_parameters(remove_duplicate=False))
    chosen = {id(p) for name, p in named.items() if choose(name, p)}
    trained = {name: p for name, p in module.named_parameters() if id(p) in chosen}
    if not trained:
        raise ValueError(
            f"{trainable=} leaves nothing to train of {type(module).__name__}, whose parameters "
            f"are {validation.listed(named)}: choose some by name, or let some require grad"
        )
    return {name: p.detach().clone() for name, p in trained.items()}, Apply(
        module, trained
    )


def to_module(
    params: Mapping[str, Tensor],
    module: Module,
    *,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes params, and buffers, into the module's tensors of the same names.

    Other tensors of the module stay as they are. A module that writes to its buffers in training,
    such as BatchNorm, needs ``buffers=``.

    >>> module = torch.nn.Linear(1, 1)
    >>> to_module({"bias": torch.tensor([3.0])}, module)
    >>> module.bias.item()
    3.0
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    validation.check_names("params", params, own, (), "pass params of this module")
    known = dict(module.named_buffers(remove_duplicate=False))
    carried, written = buffers or {}, validation.written_in_training(module)
    validation.check_names("buffers", carried, known, written, first_call.BUFFERS)
    values = {
        **params,
        **{name: _whole(each, known[name]) for name, each in carried.items()},
    }
    places = own | known
    for name, value in values.items():
        if tree.format_leaf(value) != tree.format_leaf(places[name]):
            raise ValueError(
                f"{name} is {tree.format_leaf(value)}, and the module's is "
                f"{tree.format_leaf(places[name])}: "
                "write back to the module that from_module took, or one like it"
            )
    with torch.no_grad():
        for name, value in values.items():
            places[name].copy_(value)


class Apply:
    """``apply(params, *args, **kwargs)``: the function that ``from_module`` makes of a module."""

    eval: Apply
    """The same of the module in evaluation mode."""

    def __init__(self, module: Module, trained: Mapping[str, Parameter]) -> None:
        never_compiled_alone(Apply.__call__)
        buffers = dict(module.named_buffers())
        held: dict[int, tuple[str, Tensor]] = {
            id(p): (name, p) for name, p in trained.items()
        }
        named = dict(module.named_parameters())
        for name, each in [
            *buffers.items(),
            *named.items(),
            *rebuild.tensors_held_by(module),
        ]:
            # spectral_norm puts an alias of weight_orig in place of a weight that it computes.
            if isinstance(each, Tensor) and f"{name}_orig" not in named:
                held.setdefault(id(each), (name, each))
        tensors = dict(held.values())
        validation.check_params(trained, tensors)
        self._trained, self._names = trained, [*trained]
        # Aliases: a module may assign to their .data.
        self._constants = {
            n: each.detach() for n, each in tensors.items() if n not in trained
        }
        self._buffers = {name: self._constants[name] for name in buffers}
        self._written = validation.written_in_training(module)
        self._mappings = outside.find_mappings(module)
        self._parts = [*module.modules()] if self._mappings else []
        self._plan = rebuild.make_recipe(module, [*tensors.values()], self._mappings)
        self._models = huggingface.models_of(module)
        self._second = any(
            getattr(each, "batch_first", None) is False for each in module.modules()
        )
        self._hooks_backward = hooks_backward(module.modules())
        # Kinds of calls that were looked at. A compiler's, None, is not.
        self._evaluates, self._known = False, set[Any]({None})
        self.eval = copy(self)
        self.eval._evaluates, self.eval._known, self.eval.eval = True, {None}, self.eval

    def __call__(
        self,
        params: Mapping[str, Tensor],
        /,
        *args: Any,
        buffers: Mapping[str, Tensor] | None = None,
        key: Keys | None = None,
        **kwargs: Any,
    ) -> Any:
        """The module's output; with ``buffers``, ``(output, buffers)``; with ``key``, its noise."""
        names, carried = self._names, buffers or {}
        validation.check_names(
            "params", params, names, names, "pass those of from_module, no others"
        )
        validation.check_names(
            "buffers", carried, self._buffers, self._written, first_call.BUFFERS
        )
        carried = {
            n: _whole(each, self._buffers[n]).clone() for n, each in carried.items()
        }
        values = [params[name] for name in names]
        looked_at: AbstractContextManager[object] = nullcontext()
        kind: Any = None
        traced = torch.compiler.is_dynamo_compiling()
        if traced:
            if self._hooks_backward:
                raise ValueError(
                    "a compiler leaves hooks on a module's backward pass out"
                )
            for owner, name in self._models.inspected:
                inspect.signature(getattr(owner, name))  # Now the compiler knows it.
        else:
            values = [*map(_as_parameter, values)]
            flags = [
                each
                for each in (*args, *kwargs.values())
                if isinstance(each, bool | str)
            ]
            kind = (
                torch.is_grad_enabled(),
                type(key),
                *carried,
                len(args),
                *kwargs,
                *flags,
            )
            if kind not in self._known and len(self._known) > MAX_KINDS:
                kind = None  # Each prompt, say, would be another kind.
            if kind not in self._known:
                # The first of a kind is looked at, and refused before it does any harm.
                kept = {**self._constants, **dict(zip(names, values, strict=True))}
                inputs = tree.leaves((args, kwargs))
                looked_at = first_call.check_first_call(
                    kept, self._trained, inputs, key is not None
                )
        held = {**self._constants, **carried}
        module = rebuild.rebuild(self._plan, [*values, *held.values()], self._evaluates)
        noise = (
            nullcontext()
            if key is None
            else dropout.KeyedDropout(key, second=self._second)
        )
        names_of_parts: AbstractContextManager[object] = nullcontext()
        if self._mappings and kind is not None:
            names_of_parts = outside.rekey_mappings(
                self._mappings, self._parts, [*module.modules()]
            )
        with looked_at, noise, names_of_parts:
            output = module(*args, **kwargs)
        if traced and key is not None:
            check_no_rand_in_trace()
        huggingface.check_call(self._models, args, kwargs, output)
        if kind not in self._known:
            first_call.check_assigned(
                module, {n: held[n] for n in self._buffers if n not in carried}
            )
            self._known.add(kind)
        if buffers is None:
            return output
        return output, {name: module.get_buffer(name) for name in carried}


def _as_parameter(p: Tensor) -> Tensor:
    """An alias that is an ``nn.Parameter`` to the module, where the param is a leaf, and wide.

    A cast of a param, or what ``unshard`` returns, is no leaf, and ``checks.recomputation`` takes
    parameters for those of another module. In half precision a leaf sums in float32, and an alias
    does not.
    """
    plain = type(p) in (Tensor, Parameter) and p.is_leaf
    return (
        p.as_subclass(Parameter)
        if plain and tree.accumulation_dtype(p.dtype) is p.dtype
        else p
    )


def _whole(value: Tensor, like: Tensor) -> Tensor:
    """A mean of buffers in their dtype, of whole numbers, of steps say, as the number it is."""
    if value.is_floating_point() and not like.is_complex():
        return (value if like.is_floating_point() else value.round()).to(like.dtype)
    return value
