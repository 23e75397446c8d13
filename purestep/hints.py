"""Explains likely mistakes of a first hour: by a warning, or a note on their error."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import IGNORE_INDEX, describe_microbatch, note_single_batch
from purestep.types import Microbatch, OptState, Params

_NOTES = {
    r"unexpected keyword argument '(reduction|size_average|reduce)'": (
        "ps.losses return one loss per token, as reduction='none' of torch's: leave the argument "
        "out, since the step sums the losses and divides once"
    ),
    r"Expected target size|Expected input batch_size|size mismatch.*target": (
        "torch's cross_entropy wants classes in the second dimension: pass logits.mT, or take "
        "ps.losses.cross_entropy(logits, labels)"
    ),
    r"Target -?\d+ is out of bounds": (
        "labels are class numbers, from 0 to the number of logits less 1: mark a token that does "
        f"not count by {IGNORE_INDEX}, as labels.masked_fill(labels == -1, {IGNORE_INDEX}) does"
    ),
    r"'Shard'|not Shard": (
        'with gather="loss", the loss sees each ps.Shard as it is: call ps.unshard(params) in '
        'loss_fn, or pass gather="step" to the step'
    ),
    r"a leaf Variable that requires grad is being used in an in-place operation": (
        "loss_fn writes to params in place: compute a new tensor, and pass it on in a new tree, as "
        "{**params, name: tensor}"
    ),
}
"""Notes on errors of torch, by a pattern of the error's text."""

_MIXED = re.compile(
    r"same (device|dtype|type)|expected (device|dtype|scalar type)|dtypes? match"
    r"|[Tt]ype \(.*should be the same"
)
"""Finds torch's errors for operands on different devices, or of different dtypes."""

MAX_NAMES = 8
"""How many names of params an error lists."""


_KEYWORDS = {
    r"accum\w*_(steps|batches)$|accumulation$|num_microbatches": (
        "an update accumulates over as many microbatches as the group has: pass ps.split(batch, "
        "k), or take groups of ps.group(loader, k)"
    ),
    r"max_grad_norm|clip": (
        "the optimizer clips: ps.optim.chain(ps.optim.clip_by_global_norm(1.0), optimizer). With "
        "ps.make_backward, clip after backward(microbatches)"
    ),
    r"mesh|world_size|process_group|^(local_)?rank$": (
        'ranks are named by axis=ps.MeshAxis(mesh, "dp")'
    ),
    r"sched|^lr$|learning_rate|warmup": (
        "the optimizer takes the rate: pass a schedule as its learning rate"
    ),
    r"precision|autocast|^amp$|scaler|^dtype$": (
        "loss_fn opens torch.autocast, and accum_dtype= is the dtype of the sums"
    ),
    r"^(model|module)$": (
        "loss_fn calls the module: take params, apply = ps.from_module(module)"
    ),
}
"""Advice for keywords that other trainers take, by a pattern of the name."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def explain_keywords(make: FunctionT) -> FunctionT:
    """Wraps a function to add a note to the error for a keyword that other trainers take.

    >>> try:
    ...     explain_keywords(lambda loss_fn: loss_fn)(grad_accum_steps=4)
    ... except TypeError as error:
    ...     print(error.__notes__[0][:45])
    an update accumulates over as many microbatch
    """
    name = getattr(make, "__qualname__", "")

    @wraps(make)
    def make_or_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            keyword = re.search(
                rf"^{re.escape(name)}\(\).*unexpected keyword argument '(\w+)'",
                str(error),
            )
            for pattern, note in _KEYWORDS.items():
                if keyword and re.search(pattern, keyword[1]):
                    error.add_note(note)
                    break
            raise

    return cast("FunctionT", make_or_explain)


@contextmanager
def annotate_loss_errors(
    first: str, params: Params, microbatch: Microbatch
) -> Iterator[None]:
    """Adds notes to an error that a loss raises in this context, and raises it again.

    The notes say how ``loss_fn`` is called, with ``first`` as its first argument. After a
    ``KeyError`` they list names: those of the microbatch if it is a mapping. They also list the
    first ``MAX_NAMES`` of params if neither has the key, a text. Where devices or dtypes are mixed,
    they name a tensor of the microbatch that differs from params. They also explain errors of torch
    that are common in a first hour.
    """
    try:
        yield
    except Exception as error:
        explain_loss_error(error, first, params, microbatch)
        raise


def explain_loss_error(
    error: Exception, first: str, params: Params, microbatch: Microbatch
) -> None:
    """Adds the notes of ``annotate_loss_errors`` to an error that a loss has raised, in place.

    ``first`` names the first argument of ``loss_fn`` in a note, such as "params". The caller raises
    the error again.
    """
    what = ""
    if not isinstance(microbatch, Mapping):
        what = f". This microbatch is {describe_microbatch(microbatch)}"
    error.add_note(
        f"raised in loss_fn, which is called as loss_fn({first}, microbatch): {first} first, "
        f"and a microbatch of the group second{what}"
    )
    text = str(error)
    notes = [note for pattern, note in _NOTES.items() if re.search(pattern, text)]
    if isinstance(error, KeyError):
        notes += _list_names(error, params, microbatch)
    if _MIXED.search(text):
        notes += _describe_mixed(params, microbatch)
    for note in notes:
        error.add_note(note)


def _list_names(error: KeyError, params: Params, microbatch: Microbatch) -> list[str]:
    """Lists the names in the microbatch, and the first of params if neither has the missing key.

    Those of params are listed only for a key that is a text, and at most ``MAX_NAMES`` of them.

    >>> _list_names(KeyError("head"), {"tail": 1}, {"x": 2})[0]
    "this microbatch has ['x']"
    >>> _list_names(KeyError("z"), dict.fromkeys("abcdefghi"), ())
    ["params has ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 1 more; tied parameters ..."]
    """
    notes = []
    if isinstance(microbatch, Mapping):
        notes.append(f"this microbatch has {[*microbatch]}")
    key = error.args[0] if error.args else None
    if not isinstance(key, str):
        return notes
    is_known = any(isinstance(x, Mapping) and key in x for x in (params, microbatch))
    if isinstance(params, Mapping) and not is_known:
        names = [*params][:MAX_NAMES]
        more = f" and {len(params) - MAX_NAMES} more" if len(params) > MAX_NAMES else ""
        notes.append(
            f"params has {names}{more}; tied parameters have one leaf, under the first of their "
            "names"
        )
    return notes


def _describe_mixed(params: Params, microbatch: Microbatch) -> list[str]:
    """Names the first tensor of the microbatch on another device, or of another float dtype.

    Returns no note if all are as the params. Dtypes are not compared if params have several.

    >>> _describe_mixed(torch.ones(1), torch.ones(1, dtype=torch.half))[0]
    'params are torch.float32, but microbatch is torch.float16: cast it, as by .to(torch.float32)'
    """
    leaves = tree.leaves(params)
    if not leaves:
        return []
    like = leaves[0]
    has_one_dtype = all(leaf.dtype == like.dtype for leaf in leaves)
    data = tree.mappings_to_dicts(microbatch)
    paths = tree.paths(data, "microbatch")
    for path, leaf in zip(paths, tree.leaves(data), strict=True):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device != like.device:
            return [
                f"params are on {like.device}, but {path} is on {leaf.device}: move one of them, "
                f'or copy each group by ps.prefetch(groups, "{like.device}")'
            ]
        is_other = leaf.is_floating_point() and leaf.dtype != like.dtype
        if has_one_dtype and is_other:
            return [
                f"params are {like.dtype}, but {path} is {leaf.dtype}: cast it, as by "
                f".to({like.dtype})"
            ]
    return []


@contextmanager
def annotate_single_batch(microbatches: Sequence[Microbatch]) -> Iterator[None]:
    """Adds a note to an error, as ``note_single_batch`` does, and raises it again."""
    try:
        yield
    except Exception as error:
        note_single_batch(error, microbatches)
        raise


@contextmanager
def annotate_backward_errors() -> Iterator[None]:
    """Adds a note to torch's error for a second backward pass through a graph, and raises it again.

    It is raised where the loss has run a backward pass, or keeps a graph between microbatches.
    """
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "loss_fn calls .backward(), or keeps a graph from one microbatch to the next: "
                "leave that out, since the step runs the backward pass"
            )
        raise


@contextmanager
def annotate_swapped_arguments(
    init: Any, params: Params, opt_state: OptState
) -> Iterator[None]:
    """Raises an error of this context again, with a note if params and opt_state are swapped.

    They are swapped if the optimizer's ``init(opt_state)`` matches params.
    """
    try:
        yield
    except Exception as error:
        # init raises if opt_state is no tree of params: then they are not swapped.
        with suppress(Exception):
            expected = init(opt_state)
            if tree.describe_mismatch(params, expected, "opt_state") is None:
                error.add_note(
                    "params and opt_state are swapped: call update_step(params, opt_state, "
                    "microbatches)"
                )
        raise


def check_shifted(microbatches: Sequence[Microbatch]) -> None:
    """Warns if ``labels`` of the first microbatch equal its tokens, as for a loss that shifts them.

    Tokens are any other integers or bools of the labels' shape. Only labels that are not ignored
    are compared, and there must be two at least. It does not warn of labels of one dimension, of
    tensors on a device, or of a microbatch that is no mapping.

    >>> import pytest
    >>> tokens = torch.tensor([[5, 7, 9]])
    >>> with pytest.warns(UserWarning, match="shift_labels"):
    ...     check_shifted([{"input_ids": tokens, "labels": tokens}])
    """
    first = microbatches[0] if len(microbatches) else None
    if not isinstance(first, Mapping):
        return
    labels = _read_integers(first.get("labels"))
    if labels is None or labels.ndim < 2:
        return
    is_counted = labels != IGNORE_INDEX
    if is_counted.sum() < 2:
        return
    for name in first.keys() - {"labels"}:
        tokens = _read_integers(first[name])
        if tokens is None or tokens.shape != labels.shape:
            continue
        if torch.equal(tokens[is_counted], labels[is_counted]):
            warnings.warn(
                f"microbatch['labels'] equals microbatch[{name!r}]: nothing here shifts labels, so "
                "the loss would teach the model to copy. Take ps.shift_labels(tokens) for a model "
                "that predicts the next token",
                stacklevel=3,
            )
            return


def _read_integers(tensor: Any) -> Tensor | None:
    """Returns the values of an integer or bool tensor on the host, and None for anything else.

    None also in a compiler's trace, where no values are known.
    """
    if not isinstance(tensor, Tensor):
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_nested:
        return None
    return tree.concrete(tensor)


@contextmanager
def warn_of_random_draws(device: torch.device) -> Iterator[None]:
    """Warns if the context draws from torch's generators of host or device, as dropout does."""
    before = _read_generator_states(device)
    yield
    after = _read_generator_states(device)
    for old, new in zip(before, after, strict=True):
        if not torch.equal(old, new):
            warnings.warn(
                "the loss of an evaluation draws random numbers, as dropout does in training: each "
                "evaluation will differ. Call apply.eval, or module.eval() before from_module",
                stacklevel=4,
            )
            return


def _read_generator_states(device: torch.device) -> list[Tensor]:
    """Returns states of the host's generator and, if it has another one, of the device's."""
    states = [torch.get_rng_state()]
    if device.type == "cpu":
        return states
    module = getattr(torch, device.type, None)
    get_rng_state: Any = getattr(module, "get_rng_state", None)
    if get_rng_state is not None:
        states.append(get_rng_state(device))
    return states
