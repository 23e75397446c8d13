"""What a model of Hugging Face is passed and returns, where that goes wrong without a word."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from purestep import tree
from purestep.modules.watch import BUFFERS
from purestep.torch_private import adds_its_masks

_NOT = "or take a step that is not transformed"
TRANSFORMS = {
    "saved tensor hooks": (
        "the module checkpoints activations, which torch.func knows nothing of: switch that off "
        f"before from_module, by activation_checkpointing_disable() of Hugging Face's, {_NOT}"
    ),
    "Tensor.requires_grad_()": (
        "the module lets a tensor require grad, which torch.func refuses: remove the hook, by "
        f"activation_checkpointing_disable() and disable_input_require_grads(), {_NOT}"
    ),
    "mutate a captured Tensor": f"the module writes to its buffer or other tensor: {BUFFERS}",
    "setup_context": (
        "the module has a hook on its backward pass (register_full_backward_hook), or a Function "
        f"without setup_context, which torch.func refuses: remove it, {_NOT}"
    ),
    "data-dependent control flow": (
        "the module looks at values, which vmap hides, as Hugging Face's do at 2D masks, and at "
        "position_ids without a mask: pass attention_mask=ps.segment_mask(attention_mask)"
    ),
}
"""What a transform refuses of a module, by words of its error."""

Names = dict[type, tuple[str, ...]]
"""The arguments of ``forward`` by the class of a model."""


def models_of(module: Module) -> Names:
    """The classes of Hugging Face's models in a module; none where they no longer look so.

    >>> models_of(Module())
    {}
    """
    return {
        type(each): (*inspect.signature(type(each).forward).parameters,)[1:]
        for each in module.modules()
        if hasattr(type(each), "base_model_prefix") and "config" in vars(each)
    }


def inspected(module: Module) -> list[tuple[Module, str]]:
    """Methods for whose signatures transformers asks, one of each class."""
    name = "feed_forward_chunk"
    chunked = {type(each): each for each in module.modules() if hasattr(each, name)}
    return [(each, name) for each in chunked.values()]


def look_at(module: Module, models: Names) -> None:
    """Lets each of these models in the module look at its arguments and at its result."""
    calls: list[type] = []
    for each in module.modules() if models else ():
        if type(each) in models:
            each.forward = _looking(each, each.forward, models[type(each)], calls)


def _looking(
    model: Module, forward: Callable[..., Any], names: tuple[str, ...], calls: list[type]
) -> Callable[..., Any]:
    def looking(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if adds_its_masks(model):
            _check_masks(given)
        calls.append(type(model))
        output = forward(*args, **kwargs)
        calls.pop()
        # A model may pass anything to its parts: only calls from outside are checked.
        if not calls:
            _check_cache(output, given)
        return output

    return looking


def _check_masks(given: Mapping[str, Any]) -> None:
    """Refuses a mask of bools where a model adds it to its scores, True for 1."""
    for name, masks in given.items():
        if not name.endswith("attention_mask"):
            continue
        # One for each kind of layer, where there are several.
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            # Of a mask of two dimensions, which says what is padding, the model makes another.
            if isinstance(mask, Tensor) and mask.ndim > 2 and mask.dtype == torch.bool:
                raise ValueError(
                    f"{name} is {tree.kind(mask)}, which eager attention would add to its scores, "
                    "True for 1: pass one to be added, as ps.segment_mask(segments, dtype) makes "
                    'it, or set_attn_implementation("sdpa")'
                )


def _check_cache(output: Any, given: Mapping[str, Any]) -> None:
    """Refuses a cache that was not asked for, beside positions.

    A model with a cache does not read from positions where documents begin.
    """
    asked = given.get("use_cache") or given.get("past_key_values") is not None
    if given.get("position_ids") is None or asked:
        return
    filled = getattr(output, "past_key_values", None) is not None
    if isinstance(output, tuple):
        filled = any(hasattr(each, "get_seq_length") for each in output)
    if filled:
        raise ValueError(
            "the model has filled a cache, and so takes packed documents for one text whatever "
            "position_ids say: pass use_cache=False, or set model.config.use_cache = False before "
            "from_module"
        )
