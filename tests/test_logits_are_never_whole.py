"""What losses of a product hold in memory: few logits at a time, in derivatives too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.logits import Case
from purestep.losses import linear_cross_entropy
from purestep.losses.vocabulary import Head, chunk_size
from tests.logits import problem
from tests.memory import LiveBytes


def peak(losses: Callable[[Tensor, Tensor], Tensor], case: Case) -> int:
    """The bytes of forward and backward, above what comes in and goes out."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    with LiveBytes() as live:
        made = losses(hidden, weight)
        grads = torch.autograd.grad(made, (hidden, weight), torch.ones_like(made))
        returned = made.nbytes + sum(each.nbytes for each in grads)
    return live.peak - returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype) -> None:
    """Few logits' chunks and few hidden states are alive beside the inputs and the gradients; whole, it is logits three times."""
    tokens, features, classes, chunk = 256, 8, 8192, 128
    case = problem(tokens, features, classes, dtype)
    found = peak(lambda h, w: linear_cross_entropy(h, w, case.labels, chunk=chunk), case)
    logits, few = 4 * tokens * chunk, 4 * tokens * (features + 16)
    assert found <= 3 * logits + 8 * few
    whole = peak(lambda h, w: ps.losses.cross_entropy(h @ w.T, case.labels), case)
    assert whole >= 2 * 4 * tokens * classes
    assert found <= whole / 10


def test_what_a_second_derivative_holds() -> None:
    """Twice the logits, of what it differentiates in all chunks; seven times where they are whole."""
    tokens, classes = 256, 16384
    case, logits = problem(tokens, 2, classes, torch.float32), 4 * tokens * classes

    def twice(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def of(hidden: Tensor, weight: Tensor) -> Tensor:
            made = losses(hidden, weight).sum()
            grads = torch.autograd.grad(made, (hidden, weight), create_graph=True)
            return torch.stack([each.square().sum() for each in grads])

        return of

    found = peak(twice(lambda h, w: linear_cross_entropy(h, w, case.labels, chunk=128)), case)
    whole = peak(twice(lambda h, w: ps.losses.cross_entropy(h @ w.T, case.labels)), case)
    assert found <= 2.5 * logits
    assert whole >= 6 * logits


def test_a_default_chunk_holds_so_many_logits() -> None:
    def size(tokens: int) -> int:
        return chunk_size(torch.empty(tokens, 1), Head(torch.empty(2**17, 1)), None)

    assert size(4096) == 1024
    assert size(1) == 2**22
    assert size(2**20) == 256
    assert size(0) == 2**22


def test_kl_divergence_never_whole_is_small() -> None:
    tokens, classes, chunk = 256, 8192, 128
    case, teacher = problem(tokens, 8, classes, torch.float32), problem(tokens, 4, classes, torch.float32)  # fmt: skip
    found = peak(
        lambda h, w: ps.losses.linear_kl_divergence(
            h, w, teacher.hidden, teacher.weight, chunk=chunk
        ),
        case,
    )
    whole = peak(
        lambda h, w: ps.losses.kl_divergence(h @ w.T, teacher.hidden @ teacher.weight.T), case
    )
    assert found <= whole / 10
