"""Tests lists of tensors: exact selections, and few operations for an update of many leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from purestep import optim, torch_private, tree
from purestep.optim.elementwise import update_params_
from purestep.step import apply_update
from purestep.tree import foreach, foreach_where
from support.devices import Waits, get_device as lazy
from support.strategies import assert_same
from tests.memory import CountOperations

SPECIAL = [0.0, -0.0, 1.5, -torch.inf, torch.nan]
INTEGERS = [0, 1, -(2**62), 2**62, -3]
HALVES = [torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]


def list_bits(leaf: Tensor) -> list[int]:
    """Lists the leaf's bits, since NaN is equal to nothing."""
    if leaf.dtype == torch.bool:
        return leaf.tolist()
    return foreach_where.view_bits(leaf).tolist()


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.int64, *HALVES, *COMPLEX],
)
def test_a_selection_is_exact_to_the_bit(dtype: torch.dtype, condition: bool) -> None:
    """NaN, infinities, the sign of zero, and numbers whose difference overflows."""
    values = INTEGERS if dtype == torch.int64 else SPECIAL
    reverse = values[::-1]
    rotated = values[1:] + values[:1]
    old = [
        torch.tensor(values, dtype=dtype),
        torch.tensor(reverse, dtype=dtype),
    ]
    new = [
        torch.tensor(reverse, dtype=dtype),
        torch.tensor(rotated, dtype=dtype),
    ]
    new_bits = [list_bits(leaf) for leaf in new]
    old_bits = [list_bits(leaf) for leaf in old]
    expected = new_bits if condition else old_bits
    flag = torch.tensor(condition)

    by_leaf = foreach_where.select_by_leaf(old, new, flag)
    assert [list_bits(leaf) for leaf in by_leaf] == expected

    foreach_where.select_by_bits(old, new, flag)
    assert [list_bits(leaf) for leaf in old] == expected
    assert [list_bits(leaf) for leaf in new] == new_bits


@pytest.mark.parametrize("condition", [True, False])
def test_a_selection_of_new_values_of_several_dtypes(condition: bool) -> None:
    old = [torch.zeros(2), torch.zeros(2)]
    new = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    foreach_where.select_by_bits(old, new, torch.tensor(condition))
    assert_same(old, [torch.full((2,), float(condition))] * 2)


def test_a_skipped_update_of_half_precision_keeps_params() -> None:
    """Where moments have the dtype of params, a formula casts nothing before it writes."""

    def decay(grads: list[Tensor], params: list[Tensor], mu: list[Tensor]) -> Any:
        params = foreach.cast(params, mu)
        foreach.mul_(params, 0.5)
        return params, mu

    params = [torch.ones(2, dtype=torch.bfloat16)]
    mu = [torch.zeros(2, dtype=torch.bfloat16)]
    columns = [[torch.ones(2)], params, mu]
    update_params_(decay, columns, torch.tensor(False))
    assert_same(params, [torch.ones(2, dtype=torch.bfloat16)])


def test_a_selection_of_nothing() -> None:
    foreach_where.write_where([], [], torch.tensor(True))


@pytest.mark.parametrize("condition", [True, False])
def test_a_selection_has_the_dtype_of_the_old_tensors(condition: bool) -> None:
    """``torch.where`` of int64 and float32 would round 2²⁴ + 1."""
    old = [torch.tensor([2**24 + 1])]
    foreach_where.write_where(old, [torch.ones(1)], torch.tensor(condition))
    assert_same(old, [torch.tensor([1 if condition else 2**24 + 1])])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_product_by_one_clones(dtype: torch.dtype) -> None:
    """For a torch without ``_foreach_clone``."""
    values: list[float] = [0, 1, -3]
    if dtype != torch.int64:
        # Without NaN, whose bits may change.
        values = SPECIAL[:-1]
    leaf = torch.tensor(values).to(dtype)

    (clone,) = torch_private.multiply_by_one([leaf])

    assert clone.dtype == dtype
    assert clone.data_ptr() != leaf.data_ptr()
    assert list_bits(clone) == list_bits(leaf)


CLIP = optim.clip_by_global_norm(1.0)
OPTIMIZERS = {
    "sgd": optim.sgd(0.5),
    "decayed sgd": optim.sgd(0.5, weight_decay=0.5),
    "momentum": optim.sgd(0.5, 0.5),
    "nesterov": optim.sgd(0.5, 0.5, nesterov=True),
    "lion": optim.lion(0.5),
    "clip, adamw": optim.chain(CLIP, optim.adamw(0.125)),
    "clip, adam": optim.chain(CLIP, optim.scale_by_adam(), optim.sgd(0.125)),
    "master": optim.master_weights(optim.adamw(0.125)),
    "ema": optim.ema(optim.adamw(0.125), 0.5),
}
MOST = 40
"""The most operations of an update, from its gradients on."""


def count_operations(
    optimizer: optim.Optimizer,
    num_leaves: int,
    dtype: torch.dtype,
    *,
    donate: bool,
    skips: bool,
) -> int:
    """Counts the operations of an update on the device, where nothing may wait."""
    param = torch.ones(3, dtype=dtype)
    params = [param.clone().to(lazy()) for _ in range(num_leaves)]
    grads = [torch.ones(3).to(lazy()) for _ in range(num_leaves)]
    state = optimizer.init(params)
    with Waits() as waits:
        applied = torch.ones_like(grads[0][0]) > 0
        if skips:
            applied = tree.all_finite(grads)
        with CountOperations() as operations:
            tree.global_norm(grads)
            apply_update(optimizer, grads, state, params, applied, donate=donate)
    assert waits.seen == []
    return operations.names.total()


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_runs_as_many_operations_for_ten_leaves_as_for_thousands(
    name: str, dtype: torch.dtype, donate: bool, skips: bool
) -> None:
    """On a device, each operation of each leaf would be a kernel launch."""
    optimizer = OPTIMIZERS[name]

    for_ten = count_operations(optimizer, 10, dtype, donate=donate, skips=skips)
    for_fifty = count_operations(optimizer, 50, dtype, donate=donate, skips=skips)

    assert for_ten == for_fifty <= MOST


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_expanded_gradients(name: str) -> None:
    """Autograd makes them of ``x.sum()``.

    All elements share one memory, so nothing may write to it.
    """
    optimizer = OPTIMIZERS[name]
    params = [torch.ones(4, 3), torch.ones(3)]
    grads = [
        torch.tensor(2.0).expand(4, 3),
        torch.tensor(3.0).expand(3),
    ]
    state = optimizer.init(params)
    expected = optimizer.update(grads, state, params)
    assert optimizer.update_ is not None

    actual = optimizer.update_(grads, state, params, None)

    assert_same(actual, expected)
    strides = [grad.stride() for grad in grads]
    assert strides == [(0, 0), (0,)]
