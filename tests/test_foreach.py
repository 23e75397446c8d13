"""Lists of tensors: a selection to the bit, and how many operations an update of many leaves runs."""

import pytest
import torch
from torch import Tensor

from proofs.devices import Waits, device as lazy
from proofs.strategies import assert_same
from purestep import optim, torch_private, tree
from purestep.step import apply_update
from purestep.tree import foreach_where
from tests.memory import Operations

SPECIAL = [0.0, -0.0, 1.5, -torch.inf, torch.nan]
HALVES = [torch.float16, torch.bfloat16]


def bits(leaf: Tensor) -> list[int]:
    """The leaf's bits, since NaN is equal to nothing."""
    if leaf.dtype == torch.bool:
        return leaf.tolist()
    return leaf.view(foreach_where.INTEGERS[leaf.itemsize]).tolist()


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, *HALVES])
def test_a_selection_is_exact_to_the_bit(dtype: torch.dtype, condition: bool) -> None:
    """NaN and infinities on either side, the sign of zero, numbers whose difference overflows."""
    finite = [0, 1, -(2**62), 2**62, -3]
    values = finite if dtype == torch.int64 else SPECIAL
    old = [torch.tensor(values, dtype=dtype), torch.tensor(values[::-1], dtype=dtype)]
    new = [
        torch.tensor(values[::-1], dtype=dtype),
        torch.tensor(values[1:] + values[:1], dtype=dtype),
    ]
    wanted = [bits(leaf) for leaf in (new if condition else old)]
    unchanged = [bits(leaf) for leaf in new]
    flag = torch.tensor(condition)
    by_leaf = foreach_where.select_by_leaf(old, new, flag)
    assert [bits(leaf) for leaf in by_leaf] == wanted
    foreach_where.select_by_bits(old, new, flag)
    assert [bits(leaf) for leaf in old] == wanted
    assert [bits(leaf) for leaf in new] == unchanged


def test_a_product_by_one_clones() -> None:
    """For a torch without ``_foreach_clone``."""
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        values = (
            [0, 1, -3] if dtype == torch.int64 else SPECIAL[:-1]
        )  # NaN has many bits.
        leaf = torch.tensor(values).to(dtype)
        (clone,) = torch_private.multiply_by_one([leaf])
        assert clone.dtype == dtype
        assert clone.data_ptr() != leaf.data_ptr()
        assert bits(clone) == bits(leaf)


OPTIMIZERS = {
    "sgd": optim.sgd(0.5),
    "decayed sgd": optim.sgd(0.5, weight_decay=0.5),
    "momentum": optim.sgd(0.5, 0.5),
    "nesterov": optim.sgd(0.5, 0.5, nesterov=True),
    "lion": optim.lion(0.5),
    "clip, adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
    "clip, adam": optim.chain(
        optim.clip_by_global_norm(1.0), optim.scale_by_adam(), optim.descend(0.125)
    ),
    "master": optim.master_weights(optim.adamw(0.125)),
    "ema": optim.ema(optim.adamw(0.125), 0.5),
}
MOST = 40
"""Operations of an update, from its gradients on."""


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_runs_as_many_operations_for_ten_leaves_as_for_thousands(
    name: str, dtype: torch.dtype, donate: bool, skips: bool
) -> None:
    """On a device, where each would be a launch for every leaf. Nothing waits."""
    optimizer, counts = OPTIMIZERS[name], []
    for number in (10, 50):
        params = [
            torch.ones(3, dtype=dtype, device="cpu").to(lazy()) for _ in range(number)
        ]
        state = optimizer.init(params)
        grads = [torch.ones(3).to(lazy()) for _ in range(number)]
        with Waits() as waits:
            applied = (
                tree.all_finite(grads) if skips else torch.ones_like(grads[0][0]) > 0
            )
            with Operations() as operations:
                tree.global_norm(grads)
                apply_update(optimizer, grads, state, params, applied, donate=donate)
        assert waits.seen == []
        counts.append(operations.names.total())
    assert counts[0] == counts[1] <= MOST


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_expanded_gradients_are_taken(name: str) -> None:
    """As autograd gives them of ``x.sum()``: one memory for all elements, which nothing may write."""
    optimizer, params = OPTIMIZERS[name], [torch.ones(4, 3), torch.ones(3)]
    grads = [torch.tensor(2.0).expand(4, 3), torch.tensor(3.0).expand(3)]
    state = optimizer.init(params)
    wanted = optimizer.update(grads, state, params)
    assert optimizer.update_ is not None
    assert_same(optimizer.update_(grads, state, params, None), wanted)
    assert [grad.stride() for grad in grads] == [(0, 0), (0,)]
