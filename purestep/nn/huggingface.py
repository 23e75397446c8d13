"""What a model of Hugging Face is passed and returns, where that goes wrong without a word."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from purestep import tree
from purestep.torch_private import adds_its_masks


class Models(NamedTuple):
    """Hugging Face's models in a module, and what is asked of them at calls."""

    models: list[Module]
    arguments: list[str]
    """Those of the module's ``forward``, by position."""
    inspected: list[tuple[Module, str]]
    """Methods for whose signatures calls ask, which a compiler has to know before."""


def models_of(module: Module) -> Models:
    """Those whose classes look so.

    >>> models_of(torch.nn.Linear(1, 1)).models
    []
    """
    name = "feed_forward_chunk"
    chunked = {type(each): each for each in module.modules() if hasattr(each, name)}
    return Models(
        [each for each in module.modules() if hasattr(type(each), "base_model_prefix")],
        [*inspect.signature(type(module).forward).parameters][1:],
        [(module, "register_buffer"), *((each, name) for each in chunked.values())],
    )


def check_call(
    models: Models, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> None:
    """Refuses masks of bools that a model adds to its scores, and caches that join documents.

    What a module passes to the models within it is not looked at.
    """
    given = {**dict(zip(models.arguments, args, strict=False)), **kwargs}
    for name, masks in given.items() if any(map(adds_its_masks, models.models)) else ():
        # One for each kind of layer, where there are several.
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            # Of a mask of two dimensions, which says what is padding, the model makes another.
            added = (
                name.endswith("attention_mask")
                and isinstance(mask, Tensor)
                and mask.ndim > 2
            )
            if added and mask.dtype == torch.bool:
                raise ValueError(
                    f"{name} is {tree.format_leaf(mask)}, which eager attention would "
                    "add to its scores, "
                    "True for 1: pass one to be added, as ps.segment_mask(segments, dtype) makes "
                    'it, or set_attn_implementation("sdpa")'
                )
    asked = given.get("use_cache") or given.get("past_key_values") is not None
    parts = output if isinstance(output, tuple) else ()
    filled = any(hasattr(each, "get_seq_length") for each in parts)
    filled = filled or getattr(output, "past_key_values", None) is not None
    if models.models and filled and not asked and given.get("position_ids") is not None:
        raise ValueError(
            "the model has filled a cache, and so takes packed documents for one text whatever "
            "position_ids say: pass use_cache=False, or set model.config.use_cache = False before "
            "from_module"
        )
