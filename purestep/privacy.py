"""Differential privacy: no example moves the sum of the gradients by more than ``clip``, and noise hides who was there.

    g = Σₑ gₑ · min(1, clip / ‖gₑ‖₂)  +  noise · clip · z,    z ~ N(0, 1)

The sum runs over all examples of a group, and has one z in each element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.batching.cut import common_length, whole_leaves
from purestep.reverse_mode import grad_and_value as plain_grad_and_value
from purestep.tree import accumulation_dtype
from purestep.types import Microbatch, Params, ReverseMode, Tally


def per_example(
    *,
    clip: float,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> ReverseMode:
    """A ``grad_and_value=`` for differential privacy [Abadi et al., 2016], with ``normalize="grads"``.

    An example is a row of the microbatch, along the first dimension of all its leaves; a leaf without dimensions is
    given to each row. (What ``pack_documents`` puts into one row is one example.) A row's gradient, of the weighted
    sum of its tokens' losses, is clipped to the norm ``clip`` over the whole tree. Rows of weight 0 add exactly zero,
    whatever their gradient is.

    The noise belongs to the group: it is drawn once a step, after the sum over all microbatches of all ranks,
    whatever the cut. Every rank draws the same, from a generator in the same state (the same seed), which ranks
    compare. A step moves the generator on: save its ``get_state()`` with the rest of a run. A step inside of
    ``VmapAxis(size).map`` needs ``randomness="same"`` there. No compiler follows a generator, so ``ps.compile`` makes
    more than one graph of a whole step with noise; ``compile=True`` compiles what it always does.

    What is divided by is N, the sum of the weights, as ever. The loss, N and aux of the metrics are exact, so keep them to
    yourself; ``grad_norm`` is that of the noisy sum. How private a run was, an accountant tells from ``noise``, the
    sampling and the number of steps.

    Args:
        clip: the most by which one example moves the sum.
        noise: the standard deviation of the noise in each element of the sum, in multiples of ``clip``.
        generator: what draws it, on any device; torch's global one is never used.
        chunk_size: how many rows' gradients are held at once; None: those of a whole microbatch.

    >>> from purestep import make_update_step, optim
    >>> step = make_update_step(
    ...     lambda w, m: m @ w, optim.sgd(1.0), weight_fn=lambda m: torch.ones(len(m)), normalize="grads",
    ...     grad_and_value=per_example(clip=2.5),
    ... )
    >>> w = torch.zeros(2)
    >>> step(w, optim.sgd(1.0).init(w), [torch.tensor([[3.0, 4.0], [0.5, 0.0]])])[0]  # (1.5, 2), (0.5, 0)
    tensor([-1., -1.])
    """
    if not clip > 0:
        raise ValueError(f"per_example: {clip=} must be a norm above 0")
    if not (noise >= 0 and math.isfinite(noise)):
        raise ValueError(f"per_example: {noise=} must be a number of clips, 0 or more")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"per_example: {chunk_size=} must be a number of rows, 1 or more, or None")
    deviation = noise * clip if noise else 0.0
    if not math.isfinite(deviation):
        raise ValueError(f"per_example: {noise=} times {clip=} is no finite deviation")

    def grad_and_value(
        func: Callable[..., Any], /, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
    ) -> Callable[..., Any]:
        if argnums != 0:
            raise ValueError(
                f"per_example differentiates func(params, microbatch) by its params: {argnums=} must be 0"
            )
        return of_rows(func, clip, chunk_size, has_aux)

    if not deviation:
        return ReverseMode(grad_and_value)
    if generator is None:
        raise ValueError(
            f"per_example: {noise=} needs a generator, the same on every rank: "
            "generator=torch.Generator().manual_seed(seed)"
        )
    source = generator

    def begin() -> tuple[str, Callable[[list[Tensor]], list[Tensor]]]:
        state = source.get_state()
        digest = hashlib.sha256(state.numpy().tobytes()).hexdigest()

        def noised(grads: list[Tensor]) -> list[Tensor]:
            # From the state that was compared, also where the ranks are threads that share one generator.
            own = torch.Generator(source.device).set_state(state)

            def drawn(like: Tensor) -> Tensor:
                kind: Any = {"dtype": like.dtype, "device": own.device, "generator": own}
                return torch.randn(like.shape, **kind).to(like.device)

            noisy = [torch.add(grad, drawn(grad), alpha=deviation) for grad in grads]
            source.set_state(own.get_state())
            return noisy

        return f"{clip=}, {noise=}, a generator in the state {digest[:16]}", noised

    return ReverseMode(grad_and_value, begin)


def of_rows(
    func: Callable[..., Any], clip: float, chunk_size: int | None, has_aux: bool
) -> Callable[[Params, Microbatch], Any]:
    """A function to the sums over rows: of clipped gradients, and of what ``func`` gives."""

    def run(params: Params, microbatch: Microbatch, /) -> Any:
        microbatch = tree.plain(microbatch)
        leaves, kind = tree.flatten(microbatch)
        whole = whole_leaves(microbatch)
        rows = common_length(microbatch, "microbatch", whole)
        structure: tree.Structure = None

        def of_row(*row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal structure
            each = [x if alone else x[None] for x, alone in zip(row, whole, strict=True)]
            differentiate = plain_grad_and_value(func, has_aux=has_aux)
            grads, output = differentiate(params, tree.unflatten(kind, each))
            output_leaves, structure = tree.flatten(output)
            return tree.leaves_of(grads), output_leaves

        if not rows:
            return tree.zeros_like(params), func(params, microbatch)
        dims = tuple([None if alone else 0 for alone in whole])
        # Rows draw for themselves where a loss draws from the global generator, as dropout does.
        of_chunk = torch.vmap(of_row, dims, randomness="different")
        sums: list[Tensor] = []
        for start in range(0, rows, chunk_size or rows):
            chunk = slice(start, start + (chunk_size or rows))
            given = [x if alone else x[chunk] for x, alone in zip(leaves, whole, strict=True)]
            grads, beside = of_chunk(*given)
            more = summed(grads, clip, _present(tree.unflatten(structure, beside)))
            more += [each.to(accumulation_dtype(each.dtype)).sum(0) for each in beside]
            sums = [one + other for one, other in zip(sums, more, strict=True)] if sums else more
            del more
        count = len(sums) - len(beside)
        grads = tree.unflatten(tree.flatten(params)[1], sums[:count])
        return grads, tree.unflatten(structure, sums[count:])

    return run


def summed(grads: list[Tensor], clip: float, present: Tensor | None) -> list[Tensor]:
    """The sum of rows' gradients, each no longer than ``clip``; of those that are ``present`` (None: all).

    Takes them out of the list one by one.
    """
    wide = [grad.to(accumulation_dtype(grad.dtype)) for grad in grads]
    grads.clear()
    norm = norms(wide, None)
    known = tree.at_hand(norm)
    if known is None or not known.isfinite().all():
        norm = norms(wide, torch.float64)  # Squares of finite float32 may be infinite.
    # Of a norm that is NaN it is not, so such a row is NaN everywhere, and nowhere left as long as it is.
    short = norm <= clip
    # Divided by what is not 0 also where nothing is clipped: a derivative reaches both branches.
    factor = torch.where(short, 1, clip / torch.where(short, 1, norm))
    known = None if present is None else tree.at_hand(present)
    absent = None if present is None or (known is not None and known.all()) else ~present
    if absent is not None:
        factor = factor.masked_fill(absent, 0)

    def of_leaf(grad: Tensor) -> Tensor:
        along = (len(grad), *[1] * (grad.ndim - 1))
        grad = grad if absent is None else grad.masked_fill(absent.view(along), 0)
        return (grad * factor.to(grad.dtype).view(along)).sum(0)

    found: list[Tensor] = []
    while wide:
        found.append(of_leaf(wide.pop()))
    return found[::-1]


def norms(grads: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """The norm of each row over all leaves, the squares added up in ``dtype``; None: in the leaf's own, the faster way."""
    each = [
        torch.linalg.vector_norm(grad.reshape(len(grad), -1), dim=1, dtype=dtype).to(torch.float64)
        for grad in grads
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return norm


def _present(output: Any) -> Tensor | None:
    """Which rows have any tokens, where that was counted."""
    tally = output[1] if isinstance(output, tuple) and len(output) == 2 else None
    if not isinstance(tally, Tally) or not tally.num_tokens:
        return None
    return tally.num_tokens[0] > 0
