"""Checks that examples can share a microbatch: equal structures, dtypes and row shapes."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from purestep import tree
from purestep.types import Tree

Example: TypeAlias = Tree
"""A tree of tensors whose first dimension is the example's length.

Per-example leaves have no length: those without dimensions, such as a class, a key or an id, and
those that the caller names, such as an image.
"""


def check_same_fields(
    examples: Mapping[str, Example], per_example: Collection[str] = ()
) -> None:
    """Raises ``ValueError`` unless the examples have one structure, and in each leaf one dtype.

    Shapes must agree but for the length. Otherwise values would end up in another field, be
    broadcast, or be rounded.

    Args:
        examples: the examples, by the name that the error gives them.
        per_example: names of leaves that have dimensions, but no length. A name that no leaf has
            raises, too.
    """
    if not examples:
        return
    first_name, first = next(iter(examples.items()))
    first_leaves, first_spec = tree.flatten(first)
    mask = mask_per_example_leaves(first, per_example)
    for name, example in examples.items():
        leaves, spec = tree.flatten(example)
        if not tree.is_same_spec(spec, first_spec):
            raise ValueError(
                f"{name} differs in structure from {first_name}: {tree.format_spec(spec)} against "
                f"{tree.format_spec(first_spec)}; give all of them the same fields"
            )
        for i, leaf in enumerate(leaves):
            first_leaf = first_leaves[i]
            if _describe_field(leaf, mask[i]) != _describe_field(first_leaf, mask[i]):
                path = tree.paths(example, "")[i]
                raise ValueError(
                    f"{name}{path} is {tree.format_leaf(leaf)}, but {first_name}{path} is "
                    f"{tree.format_leaf(first_leaf)}: they may differ in the first dimension "
                    "alone, which is the length: of a tokenizer's (1, n) take [0]"
                )


def _describe_field(leaf: Any, is_per_example: bool) -> Any:
    """Returns what examples must share in a leaf: its dtype, and its shape but for the length.

    A leaf with ``is_per_example`` has no length. Of a leaf that is no tensor, returns the type.
    """
    if not isinstance(leaf, Tensor):
        return type(leaf)
    if is_per_example:
        return leaf.dtype, leaf.shape
    return leaf.dtype, leaf.ndim, leaf.shape[1:]


def mask_per_example_leaves(
    example: Example, names: Collection[str] = ()
) -> list[bool]:
    """Returns whether each leaf has no length: no dimensions, or one of ``names`` as its name.

    A name is the last one on a leaf's path. Raises ``ValueError`` for a name that no leaf has.

    >>> import torch
    >>> example = {"image": torch.ones(8, 8), "reward": torch.tensor(1.0), "tokens": torch.ones(3)}
    >>> mask_per_example_leaves(example, ["image"])
    [True, True, False]
    """
    leaves = tree.leaves(example)
    mask = [isinstance(leaf, Tensor) and leaf.ndim == 0 for leaf in leaves]
    if not names:
        return mask
    paths = tree.paths(example, "")
    for name in names:
        matches = [is_named(path, name) for path in paths]
        if not any(matches):
            raise ValueError(
                f"per_example={[*names]} names {name!r}: an example has only {paths[:8]}"
            )
        mask = [old or new for old, new in zip(mask, matches, strict=True)]
    return mask


def is_named(path: str, name: str) -> bool:
    """Returns whether the last name on a path is this one; items of a list have the list's name."""
    without_indices = re.sub(r"(\[\d+\])+$", "", path)
    return without_indices.endswith((f"[{name!r}]", f".{name}"))


def measure_length(
    example: Example, name: str, per_example_mask: Sequence[bool] | None = None
) -> int:
    """Returns the length of an example: the size of dimension 0, the same in all its leaves.

    Leaves that the mask marks are left out; without a mask, none are. Raises ``ValueError``, with
    ``name`` for the example, if the other leaves differ in it, or if there are none. It also does
    so if one of them has no dimensions or is no tensor.
    """
    leaves = tree.leaves(example)
    if per_example_mask is None:
        per_example_mask = [False] * len(leaves)
    lengths = set()
    for leaf, is_per_example in zip(leaves, per_example_mask, strict=True):
        if is_per_example:
            continue
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            lengths.add(leaf.shape[0])
        else:
            lengths.add(-1)  # refused below
    if len(lengths) == 1 and -1 not in lengths:
        return lengths.pop()
    hint = "make tensors of them, or name in per_example= what has no length"
    if -1 not in lengths and lengths:
        hint = "cut or pad them to one length, or name in per_example= what has none"
        if max(lengths) - min(lengths) == 1:
            hint = (
                "those that are one shorter look like labels made by slicing: take "
                "ps.shift_labels(tokens), as long as its tokens, or slice the inputs, too, as "
                "tokens[:-1]"
            )
    paths = tree.paths(example, name)
    formatted = [
        f"{path} {tree.format_leaf(leaf)}"
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    raise ValueError(
        f"the leaves of {name} need one common first dimension, but are {formatted[:8]}, "
        f"{len(formatted)} in all: {hint}. ps.split cuts one batch; ps.pack takes a list of "
        "examples, which may differ"
    )
