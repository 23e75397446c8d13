"""Likely mistakes of a first hour: a warning, or a note on the error that they cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import IGNORE_INDEX
from purestep.types import Microbatch, OptState, Params

_TARGET_SIZE = re.compile(
    r"Expected target size|Expected input batch_size|size mismatch.*target"
)


@contextmanager
def annotate_loss_errors() -> Iterator[None]:
    """Adds a note to an error inside of a loss: how it is called, and what its text may mean."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "raised in loss_fn, which is called as loss_fn(params, microbatch): params first, and "
            "a microbatch of the group second"
        )
        if _TARGET_SIZE.search(str(error)):
            error.add_note(
                "torch's cross_entropy wants classes in the second dimension: pass logits.mT, or "
                "take ps.losses.cross_entropy(logits, labels)"
            )
        raise


@contextmanager
def annotate_swapped_arguments(
    init: Any, params: Params, opt_state: OptState
) -> Iterator[None]:
    """Adds a note to an error if params and opt_state have changed places."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            if tree.describe_mismatch(params, init(opt_state), "opt_state") is None:
                error.add_note(
                    "params and opt_state are swapped: call update_step(params, opt_state, "
                    "microbatches)"
                )
        raise


def check_shifted(microbatches: Sequence[Microbatch]) -> None:
    """Warns if labels are the tokens themselves, as models expect that shift them inside.

    >>> import pytest
    >>> tokens = torch.tensor([[5, 7, 9]])
    >>> with pytest.warns(UserWarning, match="shift_labels"):
    ...     check_shifted([{"input_ids": tokens, "labels": tokens}])
    """
    first = microbatches[0] if len(microbatches) else None
    if not isinstance(first, Mapping):
        return
    labels = read_values(first.get("labels"))
    if labels is None or labels.ndim < 2:
        return
    counted = labels != IGNORE_INDEX
    for name in first.keys() - {"labels"}:
        tokens = read_values(first[name])
        if tokens is None or tokens.shape != labels.shape or counted.sum() < 2:
            continue
        if torch.equal(tokens[counted], labels[counted]):
            warnings.warn(
                f"microbatch['labels'] equals microbatch[{name!r}]: nothing here shifts labels, so "
                "the loss would teach the model to copy. Take ps.shift_labels(tokens) for a model "
                "that predicts the next token",
                stacklevel=3,
            )
            return


def read_values(tensor: Any) -> Tensor | None:
    """Returns the values of a tensor of whole numbers, where the host can read them."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_nested:
        return None
    return tree.concrete(tensor)


@contextmanager
def warn_of_random_draws(device: torch.device) -> Iterator[None]:
    """Warns if what runs in the context draws from torch's generators, as dropout does."""
    before = generator_states(device)
    yield
    for old, new in zip(before, generator_states(device), strict=True):
        if not torch.equal(old, new):
            warnings.warn(
                "the loss of an evaluation draws random numbers, as dropout does in training: each "
                "evaluation will differ. Call apply.eval, or module.eval() before from_module",
                stacklevel=4,
            )
            return


def generator_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the host's generator, and of the device's."""
    states = [torch.get_rng_state()]
    read: Any = getattr(getattr(torch, device.type, None), "get_rng_state", None)
    if device.type != "cpu" and read is not None:
        states.append(read(device))
    return states
