"""The two models of the proofs, as plain functions of a dict of tensors.

* An integer ReLU network with a squared loss: with integer data every intermediate value is an integer
  of a few digits, so float64 arithmetic is exact, addition is associative, and equality is bitwise.
* A small transformer with attention, layer norm and tied embeddings: what people train.
"""

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

FEATURES, HIDDEN = 3, 4
VOCABULARY, WIDTH, HEADS, CONTEXT = 11, 8, 2, 8

Params = dict[str, Any]
Batch = dict[str, Tensor]


def integer_params(generator: torch.Generator) -> Params:
    """Small integers, in float64; nested, so that trees are trees.

    Leaves share their gradient's memory, and so do the elements of one.
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


def in_one(params: Params) -> Tensor:
    """All of them in one vector, without a tree around it."""
    hidden, shifts = params["hidden"], [params["shifts"], params["shift"]]
    leaves = [hidden["weight"], *hidden["biases"], *params["out"], *shifts]
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def parts(params: Any) -> Params:
    """The tree again, of views of the vector; a tree stays as it is."""
    if not isinstance(params, Tensor):
        return cast(Params, params)
    ends = [*itertools.accumulate([0, FEATURES * HIDDEN, *[HIDDEN] * 3, 2])]
    weight, *biases, out, shifts = (params[a:b] for a, b in itertools.pairwise(ends))
    hidden = {"weight": weight.view(FEATURES, HIDDEN), "biases": biases}
    return {"hidden": hidden, "out": [out], "shifts": shifts, "shift": params[-1]}


def integers(
    shape: tuple[int, ...], generator: torch.Generator, size: int = 2
) -> Tensor:
    """Integers from -size to size, in float64."""
    return torch.randint(-size, size + 1, shape, generator=generator).to(torch.float64)


def integer_loss(params: Any, batch: Batch) -> Tensor:
    """(out(relu(x W + Σ b)) + Σ shift − y)² for each token: ``x`` is ``(rows, length, FEATURES)``."""
    params = parts(params)
    bias = torch.stack(params["hidden"]["biases"]).sum(0)
    hidden = torch.relu(batch["x"] @ params["hidden"]["weight"] + bias)
    shift = params["shifts"].sum() + params["shift"]
    return (hidden @ params["out"][0] + shift - batch["y"]).square()


def linear_loss(params: Any, batch: Batch) -> Tensor:
    """Something linear in all parameters, whose gradients are exact in half precision too."""
    params = parts(params)
    hidden, shift = params["hidden"], params["shifts"].sum() + params["shift"]
    constant = torch.stack(hidden["biases"]).sum() + params["out"][0].sum() - shift
    # What y is reaches the gradient where it is not finite.
    return ((batch["x"] @ hidden["weight"]).sum(-1) + constant) * (
        1 + 0 * batch["y"]
    ) + batch["y"]


def transformer_params(
    generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Params:
    """One block: attention, layer norms, feed-forward; the embedding is the output layer too."""

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype) / shape[0] ** 0.5

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "position": normal(CONTEXT, WIDTH),
        "attention": {"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH)},
        "feedforward": {
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        },
        "norms": torch.ones(3, WIDTH, dtype=dtype) + normal(3, WIDTH) / 8,
    }


def transformer_loss(params: Params, batch: Batch) -> Tensor:
    """Cross entropy of each next token: ``tokens`` and ``labels`` are ``(rows, length)``.

    Rows of several documents bring their own ``positions`` and ``mask``.
    """
    tokens, labels = batch["tokens"], batch["labels"]
    length = tokens.shape[1]
    x = functional.embedding(tokens, params["embedding"])
    x = (
        x
        + params["position"][
            batch.get("positions", torch.arange(length, device=tokens.device))
        ]
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    mask = batch.get("mask", mask)
    x = x + _attention(_norm(x, params["norms"][0]), mask, params["attention"])
    hidden = functional.gelu(_norm(x, params["norms"][1]) @ params["feedforward"]["up"])
    x = x + hidden @ params["feedforward"]["down"]
    logits = _norm(x, params["norms"][2]) @ params["embedding"].T
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = functional.cross_entropy(
        logits.to(wide).flatten(0, 1),
        labels.flatten(),
        ignore_index=-100,
        reduction="none",
    )
    return losses.view(labels.shape)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,)) * scale


def _attention(x: Tensor, mask: Tensor, params: Params) -> Tensor:
    rows, length, _ = x.shape
    heads = (
        (x @ params["qkv"]).view(rows, length, 3, HEADS, WIDTH // HEADS).transpose(1, 3)
    )
    query, key, value = (heads.select(2, which) for which in range(3))
    scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    weights = scores.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(rows, length, WIDTH) @ params[
        "out"
    ]


def transformer_roundings(dtype: torch.dtype) -> int:
    """How many roundings follow one another from parameters to loss and back, for the a-priori bound.

    Each operation on the longest path rounds once; a sum of n terms rounds n times more where it is
    accumulated in ``dtype`` itself, which half precision is not: its sums are kept in float32. The way
    back is as long as the way there, and has twice the sums.
    """
    operations = 40
    sums = WIDTH * 3 + CONTEXT * 2 + 4 * WIDTH + 3 * 2 * WIDTH + VOCABULARY
    return 2 * operations + (0 if dtype.itemsize < 4 else 3 * sums)
