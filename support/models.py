"""Defines the two models of the proofs, as plain functions of a dict of tensors.

* An integer ReLU network with a squared loss: with integer data every intermediate value is an integer
  of a few digits, so float64 arithmetic is exact, addition is associative, and equality is bitwise.
* A small transformer with attention, layer norm and tied embeddings: what people train.
"""

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

FEATURES = 3
HIDDEN = 4
VOCABULARY = 11
WIDTH = 8
HEADS = 2
CONTEXT = 8

Params = dict[str, Any]
Batch = dict[str, Tensor]


def integer_params(generator: torch.Generator) -> Params:
    """Makes small integers, in float64; nested, so that trees are trees.

    The loss depends on sums of leaves and of elements, so autograd may give them gradients in shared memory.
    """
    return {
        "hidden": {
            "weight": integers((FEATURES, HIDDEN), generator),
            "biases": [integers((HIDDEN,), generator) for _ in range(2)],
        },
        "out": [integers((HIDDEN,), generator)],
        "shifts": integers((2,), generator, size=1),
        "shift": integers((), generator, size=1),
    }


def flatten_params(params: Params) -> Tensor:
    """Concatenates all parameters into one vector, without a tree around it."""
    hidden = params["hidden"]
    leaves = [
        hidden["weight"],
        *hidden["biases"],
        *params["out"],
        params["shifts"],
        params["shift"],
    ]
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def unflatten_params(params: Any) -> Params:
    """Returns the tree again, of views of the vector; a tree stays as it is."""
    if not isinstance(params, Tensor):
        return cast(Params, params)
    sizes = [FEATURES * HIDDEN, HIDDEN, HIDDEN, HIDDEN, 2]
    ends = [0, *itertools.accumulate(sizes)]
    # Lazy tensors cannot be differentiated through ``split``.
    views = [params[start:end] for start, end in itertools.pairwise(ends)]
    weight, first, second, out, shifts = views
    return {
        "hidden": {
            "weight": weight.view(FEATURES, HIDDEN),
            "biases": [first, second],
        },
        "out": [out],
        "shifts": shifts,
        "shift": params[-1],
    }


def integers(
    shape: tuple[int, ...], generator: torch.Generator, size: int = 2
) -> Tensor:
    """Draws integers from -size to size, in float64."""
    values = torch.randint(-size, size + 1, shape, generator=generator)
    return values.to(torch.float64)


def integer_loss(params: Any, batch: Batch) -> Tensor:
    """Computes (out(relu(x W + Σ b)) + Σ shift − y)² for each token: ``x`` is ``(rows, length, FEATURES)``."""
    params = unflatten_params(params)
    bias = torch.stack(params["hidden"]["biases"]).sum(0)
    hidden = torch.relu(batch["x"] @ params["hidden"]["weight"] + bias)
    shift = params["shifts"].sum() + params["shift"]
    return (hidden @ params["out"][0] + shift - batch["y"]).square()


def linear_loss(params: Any, batch: Batch) -> Tensor:
    """Computes something linear in all parameters, whose gradients are exact in half precision too."""
    params = unflatten_params(params)
    hidden = params["hidden"]
    shift = params["shifts"].sum() + params["shift"]
    constant = torch.stack(hidden["biases"]).sum() + params["out"][0].sum() - shift
    output = (batch["x"] @ hidden["weight"]).sum(-1) + constant
    # A target that is not finite reaches the gradient, too.
    return output * (1 + 0 * batch["y"]) + batch["y"]


def transformer_params(
    generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Params:
    """Makes one block: attention, layer norms, feed-forward; the embedding is the output layer too."""

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype) / shape[0] ** 0.5

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "position": normal(CONTEXT, WIDTH),
        "attention": {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
        },
        "feedforward": {
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        },
        "norms": torch.ones(3, WIDTH, dtype=dtype) + normal(3, WIDTH) / 8,
    }


def transformer_loss(params: Params, batch: Batch) -> Tensor:
    """Computes the cross entropy of each next token: ``tokens`` and ``labels`` are ``(rows, length)``.

    Rows of several documents bring their own ``positions`` and ``mask``.
    """
    tokens = batch["tokens"]
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    positions = batch.get("positions", positions)
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    mask = batch.get("mask", mask)

    x = functional.embedding(tokens, params["embedding"])
    x = x + params["position"][positions]
    norms = params["norms"]
    x = x + _attend(_normalize(x, norms[0]), mask, params["attention"])
    hidden = _normalize(x, norms[1]) @ params["feedforward"]["up"]
    x = x + functional.gelu(hidden) @ params["feedforward"]["down"]
    logits = _normalize(x, norms[2]) @ params["embedding"].T

    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = functional.cross_entropy(
        logits.to(wide).flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=-100,
        reduction="none",
    )
    return losses.view(tokens.shape)


def _normalize(x: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,)) * scale


def _attend(x: Tensor, mask: Tensor, params: Params) -> Tensor:
    rows, length, _ = x.shape
    head_width = WIDTH // HEADS
    qkv = (x @ params["qkv"]).view(rows, length, 3, HEADS, head_width)
    heads = qkv.transpose(1, 3)
    # Lazy tensors cannot be differentiated through ``unbind``.
    query, key, value = [heads.select(2, index) for index in range(3)]
    scores = query @ key.transpose(-1, -2) / head_width**0.5
    weights = scores.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1)
    output = (weights @ value).transpose(1, 2).reshape(rows, length, WIDTH)
    return output @ params["out"]


def transformer_roundings(dtype: torch.dtype) -> int:
    """Counts the roundings that follow one another from parameters to loss and back, for the a-priori bound.

    Each operation on the longest path rounds once; a sum of n terms rounds n times more where it is
    accumulated in ``dtype`` itself, which half precision is not: its sums are kept in float32. The way
    back is as long as the way there, and has twice the sums.
    """
    operations = 40
    if dtype.itemsize < 4:
        return 2 * operations
    sums = WIDTH * 3 + CONTEXT * 2 + 4 * WIDTH + 3 * 2 * WIDTH + VOCABULARY
    return 2 * operations + 3 * sums
