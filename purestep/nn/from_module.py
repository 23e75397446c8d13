"""An ``nn.Module`` as a pure function of its parameters.

    params, apply = from_module(module)        apply(params, x) = module(x), with params for its own

Each call runs on copies of the module's objects. So no tensor is swapped into the module and back,
threads do not interfere, and a checkpoint recomputes with the params of its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from purestep import tree
from purestep.nn import (
    attention,
    dropout,
    first_call,
    hooks,
    huggingface,
    outside,
    rebuild,
    tensor_parallel,
    validation,
)
from purestep.nn.units import Units, find_units, install_units
from purestep.random import KeyOrPackedKeys
from purestep.sharding.shard import unshard
from purestep.torch_private import (
    PARAMETER_MARK,
    check_no_rand_in_trace,
    has_backward_hooks,
    skip_compilation,
)
from purestep.tree.shard import Shard, is_shard
from purestep.validation import DONATED, is_leaf_of_step, reused_donation_error

MAX_SIGNATURES = 16
"""How many kinds of calls are checked: each prompt among the arguments, say, is another kind."""


def from_module(
    module: Module,
    *,
    trainable: str | Callable[[str, Parameter], bool] | None = None,
    units: Units = None,
    remat: bool = False,
) -> tuple[dict[str, Tensor], Apply]:
    """Splits a module into the params that train and ``apply``, a pure function of them.

    Args:
        module: its layers, tensors, lists and dicts are never changed. A call may change a set, a
            ``Counter``, or another object in an attribute, as by ``self.log.count += 1``, and what
            ``.numpy()`` shows. ``apply`` sees values that you later write in place to tensors that
            do not train, but no later change of mode, hooks or attributes.
        trainable: the parameters to train: a pattern of names (``"*.bias"``), or a function of name
            and parameter. None: those that require grad, as LoRA needs. A tied one matches by any
            name. At least one must be chosen.
        units: parts that gather their own sharded params while they run, for ``gather="loss"``: a
            class such as the model's block, several classes, or a function of name and module.
        remat: compute units again in the backward pass, from their inputs, as ``ps.remat``.

    Returns:
        ``params``, a dict of detached copies, each tied parameter once, by its first name, and of a
        DTensor this rank's part; and ``apply(params, *args, **kwargs)``. Other parameters and all
        buffers are constants, which are not copied. ``apply`` does not keep the module's parameters
        that train: without the module, their memory is free. If a forward hook reaches a dict or
        set, or functions reach one with layers as keys, ``apply`` keeps the module. ``apply.eval``
        runs the module in evaluation mode, for ``make_eval_step``.

    Raises ``TypeError`` for what is no plain module, such as DDP, FSDP or a compiled one. It also
    does so for a param that is no real float, or has a hook on its gradient. Raises ``ValueError``
    if nothing trains, if ``units`` chooses no part, for lazy modules and ``scale_grad_by_freq``,
    and if a param shares memory with another tensor.

    **Buffers.** ``apply(params, *args, buffers=buffers)`` returns ``(output, buffers)``, with the
    buffers after the call. A module needs this if a part in training mode writes to its buffers, as
    BatchNorm does. Then ``apply.eval`` and ``to_module`` need ``buffers`` too. Start with
    ``dict(module.named_buffers())``. Each call refuses a BatchNorm without running statistics.

    **Checks.** The first call checks the module. So do the first calls with other ``buffers``, with
    ``key``, with other keywords, flags or texts, and under ``no_grad``: 16 kinds of calls at most.
    Later kinds go unchecked. A checked call is refused, by
    ``ValueError``, if it writes to a tensor of the module or of params, or assigns to a persistent
    buffer. It is also refused if it computes with a parameter of the module instead of params.
    There is no check under a compiler: call ``apply`` once without it. Each call copies the objects
    that refer to the module, also in keys and sets. Closures of hooks are shared. A call may
    register a hook, for itself alone, if the first call with its keywords and flags does. Where a
    hook fills a dict by layer, its keys stay the module's layers. Methods that were compiled
    before, as by ``module.compile()``, run uncompiled: compile the step instead.

    **Checkpoints** with ``use_reentrant=False`` recompute with the params of their call.
    ``torch.func`` does not support checkpoints, and a step refuses reentrant ones.

    **Dropout** draws from torch's global generator. With ``apply(params, *args, key=keys)`` it
    draws from keys of shape ``(rows,)``, one for each example along the first dimension.
    ``ps.random.with_keys`` makes them. Where a row holds several examples, or the module flattens
    rows and tokens, pass ``ps.random.token_keys``. Then an example's noise depends on its key
    alone, not on the cut, padding, order or neighbours. This covers all kinds of dropout in
    ``torch.nn.functional``, attention's included. DropPath and StochasticDepth draw one number for
    each example. The first call refuses other draws of torch, and of the global generators of
    Python and numpy, by name. It does not see generators of the module's, such as
    ``numpy.random.default_rng()``.

    **Units** are for models that do not fit one device, as in ZeRO-3. Pass ``ps.shard(params,
    axis)`` and ``gather="loss"`` to the step. A unit's params are full while the unit runs, in the
    forward pass and again in the backward pass. Elsewhere each rank has shards. Params of no unit
    are gathered at the start of the call. All ranks must run the same units in the same order, so a
    unit must not depend on data: a mixture's expert, say, is no unit. A param can be used only
    inside a call of its unit. A compiler gathers all params at the start.

    **Frozen parameters**, as the base of LoRA, are ``apply.frozen``. ``apply(params, *args,
    frozen=frozen)`` takes others in their place, such as ``ps.shard(apply.frozen, axis)``. They are
    gathered with the units, and get no gradient in a step.

    **On the meta device** a module has shapes alone. Then params are on "meta", and so are their
    shards: ``ps.checkpoint.load_safetensors`` reads the values of each rank's shards. So no rank
    ever holds all of them. Buffers need values: make the module under
    ``accelerate.init_empty_weights()``, then call ``tie_weights()`` of a Hugging Face model.

    >>> params, apply = from_module(torch.nn.Linear(2, 1))
    >>> {name: tuple(p.shape) for name, p in params.items()}
    {'weight': (1, 2), 'bias': (1,)}
    >>> apply({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.zeros(1)}, torch.ones(2))
    tensor([5.])
    """
    validation.check_module(module)
    is_trainable = _make_predicate(trainable)
    # A tied parameter has several names, of which any may match; params has the first one.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    chosen_ids = {id(p) for name, p in parameters.items() if is_trainable(name, p)}
    trained = {}
    for name, p in module.named_parameters():
        if id(p) in chosen_ids:
            trained[name] = p
    if not trained:
        raise ValueError(
            f"{trainable=} leaves nothing to train of {type(module).__name__}, whose parameters "
            f"are {validation.format_names(parameters)}: choose some by name, or let some "
            "require grad"
        )
    detached = {name: p.detach() for name, p in trained.items()}
    local_parts = tensor_parallel.local_parts(detached)
    return tree.map(torch.clone, local_parts), Apply(
        module, trained, units, remat=remat
    )


def _make_predicate(trainable: Any) -> Callable[[str, Parameter], bool]:
    """Returns the function of name and parameter that says which parameters train.

    ``trainable`` may be that function, or a pattern of names; None chooses parameters that require
    grad. Raises ``TypeError`` for anything else.
    """
    if trainable is None:
        return lambda name, p: p.requires_grad
    if isinstance(trainable, str):
        return lambda name, p: fnmatchcase(name, trainable)
    if not callable(trainable):
        raise TypeError(
            f"{trainable=} must be a pattern of names, or a function of name and p"
        )
    predicate: Callable[[str, Parameter], bool] = trainable
    return predicate


def to_module(
    params: Mapping[str, Tensor],
    module: Module,
    *,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes params, and buffers, into the module's tensors of the same names.

    Other tensors of the module stay as they are. It needs ``buffers=`` if a part in training mode
    tracks running statistics, as BatchNorm does. Of a DTensor, this rank's part is written. Params
    may be those of ``from_module``, or those that ``ps.unshard`` makes full. A floating-point
    buffer is converted to the module's dtype, unless that is complex.

    Raises ``ValueError``, and writes nothing, for names that the module lacks, for other shapes or
    dtypes, and for donated params. It also does so for a ``Shard``, unless its axis is the mesh of
    the module's DTensor. It does so if such statistics are missing, and for any BatchNorm without
    them. It does so for values on the meta device, and for a module there. Raises ``TypeError`` if
    ``module`` is no module, or the others are no mappings of tensors.

    >>> module = torch.nn.Linear(1, 1)
    >>> to_module({"bias": torch.tensor([3.0])}, module)
    >>> module.bias.item()
    3.0
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"to_module(params, module) got a {type(module).__name__} as module: perhaps the "
            "arguments are swapped"
        )
    # With duplicates: a tied parameter may go by any of its names.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    module_buffers = dict(module.named_buffers(remove_duplicate=False))
    buffers = {} if buffers is None else buffers
    required = validation.find_written_buffers(module)
    validation.check_names("params", params, parameters, (), _TO_MODULE_HINT)
    validation.check_names(
        "buffers", buffers, module_buffers, required, first_call.BUFFERS_HINT
    )
    validation.check_are_tensors("params", params)
    validation.check_are_tensors("buffers", buffers)
    targets: dict[str, Tensor] = {}
    for name, tensor in (parameters | module_buffers).items():
        targets[name] = tensor_parallel.local_part(tensor)
    values = tensor_parallel.select_parts(params, parameters)
    for name, param in params.items():
        if DONATED in vars(param):
            raise reused_donation_error(f"params[{name!r}]")
    for name, buffer in buffers.items():
        values[name] = buffer
        if not is_shard(buffer):
            values[name] = _to_buffer_dtype(buffer, module_buffers[name])
    # All are checked before the first is written.
    for name, value in values.items():
        validation.check_writable(name, value, targets[name])
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


_TO_MODULE_HINT = (
    "pass params of this module; if it was changed since from_module, as by get_peft_model, change "
    "it before from_module"
)
_FROZEN_HINT = (
    "those that do not train, apply.frozen by name, and all of them that are on the meta device: "
    "ps.checkpoint.load_safetensors(path, like=ps.shard(apply.frozen, axis))"
)


class Apply:
    """Calls a module as a pure function, ``apply(params, *args, **kw)``: see ``from_module``."""

    eval: Apply
    """The same function of the module in evaluation mode."""
    frozen: dict[str, Any]
    """The parameters that do not train, by name: constants, unless a call gets others."""

    def __init__(
        self,
        module: Module,
        trained: Mapping[str, Parameter],
        units: Units = None,
        *,
        remat: bool = False,
    ) -> None:
        # A compiler whose graph breaks at a call would compile the call by itself, trace the checks
        # of a first call, and fail with an error of its own.
        skip_compilation(Apply.__call__)
        tensors = name_tensors(module, trained)
        validation.check_trained(trained, tensors)
        validation.check_no_buffer_trains(trained, module)
        # Weakly: where the module is gone, the memory of its parameters is free.
        self._own_storages = first_call.OwnStorages(trained)
        self._names = [*trained]
        self._constants: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name not in trained:
                # An alias, since a copy may assign to its ``.data``: the module's stays as it is.
                self._constants[name] = tensor.detach()
        frozen = {}
        for name, constant in self._constants.items():
            if isinstance(tensors[name], Parameter):
                frozen[name] = constant
            else:
                validation.check_has_value(name, constant)
        self.frozen = tensor_parallel.local_parts(frozen)
        self._unloaded = [name for name, p in frozen.items() if p.is_meta]
        self._buffers = {
            name: self._constants[name] for name, _ in module.named_buffers()
        }
        self._written_buffers = validation.find_written_buffers(module)
        mappings = outside.find_mappings(module)
        self._rekeying = outside.Rekeying(mappings)
        self._parts = [*module.modules()] if mappings else []
        self._recipe = rebuild.make_recipe(module, [*tensors.values()], mappings)
        self._units = find_units(module, tensors, self._recipe, units)
        self._is_remat = remat
        self._models = huggingface.models_of(module)
        inspected = huggingface.inspected_methods(module)
        self._inspected = huggingface.with_empty_modules(inspected)
        self._partial_modules = huggingface.find_partial_modules(module)
        self._layouts: tensor_parallel.Layouts = {
            **tensor_parallel.find_dtensors(tensors),
            **_find_partial_params(module, tensors, self._partial_modules),
        }
        # nn.MultiheadAttention and nn.LSTM say so of themselves.
        self._batch_second = any(
            getattr(part, "batch_first", None) is False for part in module.modules()
        )
        attention.prepare_multi_head()  # A compiler cannot, should it trace the first call.
        self._hooks_backward = has_backward_hooks(module.modules())
        self._is_eval = False
        self._registers_hooks = False
        # Signatures of the calls that were checked.
        self._known: set[Any] = set()
        self.eval = copy(self)
        self.eval._is_eval = True
        self.eval._known = set()
        self.eval.eval = self.eval

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes to pickle, with classes for the empty modules in ``_inspected``.

        An empty module itself may not be picklable: its class may expect a complete one.
        """
        inspected = [(type(owner), name) for owner, name in self._inspected]
        return {**vars(self), "_inspected": inspected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inspected = huggingface.with_empty_modules(state["_inspected"])
        vars(self).update(state, _inspected=inspected)
        attention.prepare_multi_head()

    def __call__(
        self,
        params: Mapping[str, Tensor],
        /,
        *args: Any,
        buffers: Mapping[str, Tensor] | None = None,
        key: KeyOrPackedKeys | None = None,
        frozen: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the module's output with these params; with ``buffers``, ``(output, buffers)``.

        A copy of the module runs. With ``key``, dropout draws from these keys. ``frozen``
        are used for parameters that do not train: tensors or shards, by name. The caller's
        ``buffers`` are not written to. With shards, ranks gather together.

        Raises ``ValueError`` unless params have the names of ``from_module``'s, and for calls that
        ``from_module`` says are refused. It also does so for unknown names in ``buffers`` or
        ``frozen``, and if one that the call needs is missing. Raises ``TypeError`` if one of the
        three is no mapping, or ``key`` is neither a tensor of keys nor ``PackedKeys``.
        """
        validation.check_names(
            "params",
            params,
            self._names,
            self._names,
            "pass those of from_module, no others",
        )
        buffer_values = self._clone_buffers({} if buffers is None else buffers)
        is_traced = torch.compiler.is_dynamo_compiling()
        frozen = {} if frozen is None else frozen
        validation.check_names(
            "frozen", frozen, self.frozen, self._unloaded, _FROZEN_HINT
        )
        local = tensor_parallel.select_local({**params, **frozen}, self._layouts)
        shards, params = self._gather_root(local, is_traced=is_traced)
        frozen = {name: params[name] for name in frozen}
        values = [params[name] for name in self._names]
        signature: Any = None
        first_call_check: AbstractContextManager[Any] = nullcontext()
        rekeyed: AbstractContextManager[object] = nullcontext()
        if is_traced:
            self._prepare_trace()
        else:
            values = [_as_parameter(p) for p in values]
            signature = self._find_new_signature(key, buffer_values, args, kwargs)
        if signature is not None:
            first_call_check = first_call.check_first_call(
                {
                    **self._constants,
                    **frozen,
                    **dict(zip(self._names, values, strict=True)),
                },
                self._own_storages,
                inputs=tree.leaves((args, kwargs)),
                uses_keys=key is not None,
            )
        constants = {**self._constants, **frozen, **buffer_values}
        copies = self._copy_module(
            [*values, *constants.values()],
            takes_hooks=is_traced or self._may_register_hooks(signature),
        )
        num_hooks = hooks.count_registered()
        module = copies.module
        if self._parts and not is_traced:
            rekeyed = outside.rekey_mappings(
                self._rekeying, self._parts, [*module.modules()]
            )
        with first_call_check as frozen_names, self._make_dropout_mode(key), rekeyed:
            if shards:
                install_units(
                    self._units,
                    shards,
                    copies,
                    self._layouts,
                    frozen_names,
                    is_remat=self._is_remat,
                )
            output = module(*args, **kwargs)
        if is_traced and key is not None:
            check_no_rand_in_trace()
        huggingface.check_call(self._models, args, kwargs, output)
        if signature is not None:
            self._check_buffers(module, buffer_values, [*values, *constants.values()])
            self._registers_hooks |= hooks.count_registered() > num_hooks
            self._known.add(signature)
        if buffers is None:
            return output
        return output, {name: module.get_buffer(name) for name in buffer_values}

    def _clone_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clones all buffers of the caller, because the module may write to them.

        Floating-point values get the dtype of the module's buffer, unless that is complex. Other
        values keep theirs. Raises ``ValueError`` for unknown names, and if a buffer that the module
        writes to is missing. Raises ``TypeError`` if ``buffers`` is no mapping.
        """
        validation.check_names(
            "buffers",
            buffers,
            self._buffers,
            self._written_buffers,
            first_call.BUFFERS_HINT,
        )
        clones = {}
        for name, buffer in buffers.items():
            clones[name] = _to_buffer_dtype(buffer, self._buffers[name]).clone()
        return clones

    def _gather_root(
        self, params: Mapping[str, Any], *, is_traced: bool
    ) -> tuple[dict[str, Shard], Mapping[str, Tensor]]:
        """Gathers sharded params outside units, a collective; returns units' shards, then params.

        Both are by name. Among the params, the shard's local tensor stands for a unit's param. In a
        trace there are no units, so all are gathered. Full params in ``_layouts`` are wrapped as
        their layout says: as DTensors, or by ``pvary``.
        """
        shards = {name: p for name, p in params.items() if is_shard(p)}
        if not shards:
            return {}, tensor_parallel.wrap(params, self._layouts)
        in_units = set()
        if not is_traced:
            in_units = {slot.name for unit in self._units for slot in unit.slots}
        root = {name: shards.pop(name) for name in [*shards] if name not in in_units}
        others = {name: p for name, p in params.items() if name not in shards}
        full = tensor_parallel.wrap({**others, **unshard(root)}, self._layouts)
        local = {name: shard.local for name, shard in shards.items()}
        return shards, {**full, **local}

    def _may_register_hooks(self, signature: Any) -> bool:
        """Returns whether a call may register hooks: a first call did, or this kind of call is new.

        It is new if it has a ``signature``. Once ``MAX_SIGNATURES`` kinds are known, each call may.
        """
        is_new = signature is not None or len(self._known) >= MAX_SIGNATURES
        return is_new or self._registers_hooks

    def _copy_module(
        self, tensors: Sequence[Tensor], *, takes_hooks: bool
    ) -> rebuild.Copies:
        """Copies the module around ``tensors``; for ``eval``, in evaluation mode.

        ``tensors`` replace those of the recipe, in its order. With ``takes_hooks``, a call may
        register hooks on the copy. The copy lacks the hooks and ``forward`` by which a ``tp_plan``
        sums ``param.grad``.
        """
        copies = rebuild.rebuild(
            self._recipe, tensors, self._is_eval, takes_hooks=takes_hooks
        )
        for path in self._partial_modules:
            number = self._recipe.module_numbers[path]
            huggingface.remove_grad_sums(copies.objects[number])
        return copies

    def _prepare_trace(self) -> None:
        """Raises ``ValueError`` for hooks on the module's backward pass, which a compiler drops.

        Reads the signatures of methods that are inspected in a trace, since Dynamo then has them.
        """
        if self._hooks_backward:
            raise ValueError("a compiler leaves hooks on a module's backward pass out")
        for owner, name in self._inspected:
            # Dynamo cannot read the signature of a method on an object that is made in the trace,
            # as the copies are. It keeps signatures by function, so it reads them here.
            inspect.signature(getattr(owner, name))

    def _find_new_signature(
        self,
        key: KeyOrPackedKeys | None,
        buffer_values: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Returns the signature of a call of a new kind; None for kinds that were checked.

        It is None for all calls once ``MAX_SIGNATURES`` kinds were checked. Does not add to them.

        A call of another kind may take another branch of the module. Kinds differ by grad mode,
        names of arguments and buffers, the type of ``key``, and flags and texts, such as
        ``reduction="mean"``.
        """
        arguments = [*enumerate(args), *kwargs.items()]
        flags = [item for item in arguments if isinstance(item[1], bool | str)]
        signature = (
            torch.is_grad_enabled(),
            type(key),
            *buffer_values,
            len(args),
            *kwargs,
            *flags,
        )
        if signature in self._known or len(self._known) >= MAX_SIGNATURES:
            return None
        return signature

    def _make_dropout_mode(
        self, key: KeyOrPackedKeys | None
    ) -> AbstractContextManager[object]:
        """Makes the context in which dropout draws from ``key``; with None, a null context.

        Raises ``ValueError`` for a key if there are layouts of tensor parallelism. Raises
        ``TypeError`` unless ``key`` is a tensor of keys or ``PackedKeys``.
        """
        if key is None:
            return nullcontext()
        if self._layouts:
            raise ValueError(
                "key= draws one mask for all that an example has, but ranks of tensor parallelism "
                "have parts of it: set the rates of dropout to 0, or call apply without key="
            )
        return dropout.KeyedDropout(key, batch_second=self._batch_second)

    def _check_buffers(
        self,
        module: Module,
        buffer_values: Mapping[str, Tensor],
        tensors: Sequence[Tensor],
    ) -> None:
        """Raises ``ValueError`` if a call on ``module`` has assigned to a persistent buffer.

        Those in ``buffer_values`` may get other tensors, but not None. ``tensors`` are those from
        which ``module`` was copied.
        """
        first_call.check_assigned(module, self._select_buffers(buffer_values))
        names = dict(module.named_buffers()).keys()
        if names != self._buffers.keys():
            original = self._copy_module(tensors, takes_hooks=False)
            first_call.check_emptied(module, original.module)

    def _select_buffers(self, buffer_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the module's buffers that the caller's ``buffer_values`` do not name."""
        return {
            name: buffer
            for name, buffer in self._buffers.items()
            if name not in buffer_values
        }


def name_tensors(module: Module, trained: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Returns the tensors of a module and of containers in its attributes, each once, by name.

    First come ``trained``, then buffers, other parameters, and tensors in attributes and in
    containers there. Those in sets and in other objects are left out. A tensor with several names
    has the first one. The weight that ``spectral_norm`` computes from ``weight_orig`` is left out:
    an attribute that is no parameter or buffer.
    """
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    candidates: list[tuple[str, Any]] = [
        *trained.items(),
        *buffers.items(),
        *parameters.items(),
        *rebuild.named_contents(module),
    ]
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in candidates:
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        # spectral_norm puts an alias of weight_orig in the place of a weight that it computes. A
        # buffer ``scale`` beside a parameter ``scale_orig`` is no such alias.
        is_registered = name in parameters or name in buffers
        if f"{name}_orig" in parameters and not is_registered:
            continue
        seen.add(id(value))
        tensors[name] = value
    return tensors


def _find_partial_params(
    module: Module, tensors: Mapping[str, Tensor], partial_modules: Mapping[str, Any]
) -> dict[str, tensor_parallel.PartialGradSpec]:
    """Returns the specs of params whose gradient is a sum over ranks of a mesh, by name.

    They are the direct parameters of the modules whose paths ``partial_modules`` maps to meshes.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    specs = {}
    for path, mesh in partial_modules.items():
        axis = tensor_parallel.axis_of(mesh)
        for parameter in module.get_submodule(path).parameters(recurse=False):
            name = names[id(parameter)]
            specs[name] = tensor_parallel.PartialGradSpec(axis)
    return specs


def _as_parameter(p: Tensor) -> Tensor:
    """Returns ``p``, or an alias of it; it is an ``nn.Parameter`` to the module where that is safe.

    A module may ask ``isinstance(self.weight, nn.Parameter)``. A leaf that a step has made is
    marked here by an attribute, in any dtype. It is returned itself: an alias is one more node of
    the graph. Of any other plain leaf of autograd, an alias is returned, except in half precision.
    There a leaf's gradient is summed in float32, but that of an alias is not.

    All else is returned as it is, such as casts of a param and results of ``unshard`` that have a
    graph. These are not in the params' memory, and ``forbid_module_recompute`` raises for an
    ``nn.Parameter`` in other memory.
    """
    if is_leaf_of_step(p):
        setattr(p, PARAMETER_MARK, True)
        return p
    is_plain_leaf = type(p) in (Tensor, Parameter) and p.is_leaf
    if is_plain_leaf and tree.accumulation_dtype(p.dtype) is p.dtype:
        return p.as_subclass(Parameter)
    return p


def _to_buffer_dtype(value: Tensor, buffer: Tensor) -> Tensor:
    """Returns a floating-point value, say a mean over ranks, in the dtype of the module's buffer.

    For a buffer of integers, such as ``num_batches_tracked``, it is rounded. Other values, and
    those for a complex buffer, stay as they are.
    """
    if not value.is_floating_point() or buffer.is_complex():
        return value
    if not buffer.is_floating_point():
        value = value.round()
    return value.to(buffer.dtype)
