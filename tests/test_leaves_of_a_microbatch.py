"""Tests the leaves that a microbatch is differentiated by, and the memory of the sums.

Each microbatch has its own leaves, and sums alias nothing, also with a user's ``grad_and_value``.
T1 proves it for losses that write to their leaves. Here stands what no equation shows.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.counts import with_weights
from purestep.grads.accumulate import accumulate_group
from purestep.grads.backends import make_backends
from purestep.tree import accumulation_dtype
from purestep.tree.opaque import tensors_in
from support.strategies import assert_same
from tests.memory import LiveBytes
from tests.square_loss import GRAD_BACKENDS, squares, weigh_by_one

Batch = dict[str, Tensor]
GROUP = [{"x": torch.tensor([2.0**m])} for m in range(3)]
AOT_EAGER = partial(torch.compile, backend="aot_eager")


def test_what_a_loss_keeps_of_its_leaves_is_a_constant_later() -> None:
    leaves: list[Tensor] = []

    def loss_fn(w: Tensor, m: Batch) -> Tensor:
        leaves.append(w)
        return m["x"] * w * leaves[0]

    group = [{"x": torch.ones(1)}] * 3
    sums = ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=weigh_by_one)
    assert sums.grads == 2 + 1 + 1


def test_a_hook_after_accumulation_sees_the_sum() -> None:
    seen: list[float] = []

    def record_grad(leaf: Any) -> None:
        seen.append(leaf.grad.item())

    def loss_fn(w: Tensor, m: Batch) -> Tensor:
        w.register_post_accumulate_grad_hook(record_grad)
        return w * m["x"]

    sums = ps.accumulate(loss_fn, torch.ones(1), GROUP, weight_fn=weigh_by_one)
    assert sums.grads == 7
    assert seen == [1, 3, 7]


def test_autocast_keeps_no_casts_of_leaves() -> None:
    """Frees the casts with the microbatch, in a long-lived autocast too: only the sums stay."""
    w = torch.ones(64, 64)
    x = torch.ones(2, 64, dtype=torch.bfloat16)

    def loss_fn(w: Tensor, m: Tensor) -> Tensor:
        return (m @ w).float().sum(1)

    def weight_fn(m: Tensor) -> Tensor:
        return torch.ones(2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with LiveBytes() as live:
                sums = ps.accumulate(loss_fn, w, [x] * 2, weight_fn=weight_fn)
            assert sums.grads.nbytes <= live.now < 1.2 * w.nbytes < live.peak


@pytest.mark.parametrize("settings", GRAD_BACKENDS, ids=["own", "torch.func"])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", ["w", "beside"])
def test_params_are_not_written_to(
    settings: dict[str, Any], recorded: bool, name: str
) -> None:
    """Refuses a write to a param that the loss reads, and to one that it does not."""

    def loss_fn(p: Any, m: Batch) -> Tensor:
        with torch.no_grad():
            p[name].lerp_(m["x"], 0.5)
        return squares(p["w"], m)

    leaf = torch.zeros(1, requires_grad=recorded)
    params = {"beside": leaf.clone(), "w": leaf.clone()}
    group = [{"x": torch.ones(1)}]
    message = rf"loss_fn wrote to params\['{name}'\] in place"
    with pytest.raises(ValueError, match=message):
        ps.accumulate(loss_fn, params, group, weight_fn=weigh_by_one, **settings)


def test_evaluation_does_not_mark_its_data() -> None:
    m = {"x": torch.ones(2)}

    def loss_fn(w: Tensor, m: Batch) -> Tensor:
        return w * m["x"].requires_grad_()

    evaluate = ps.make_eval_step(loss_fn, weight_fn=weigh_by_one)
    evaluate(torch.tensor(1.0), [m])
    assert not m["x"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accum_dtype", [None, torch.float64])
def test_a_sum_that_is_ready_is_taken(dtype: torch.dtype, accum_dtype: Any) -> None:
    """Calls ``ready`` once, with a final sum, and returns what it returned.

    Where bit m of i is set, leaf i has a gradient of 2 ** m in microbatch m.
    """
    params = [torch.ones(1, dtype=dtype) for _ in range(8)]
    wide = accum_dtype or accumulation_dtype(dtype)
    buffers = torch.zeros(8, 1, dtype=wide).unbind()
    seen: dict[int, float] = {}

    def ready(index: int, total: Tensor) -> Tensor:
        assert index not in seen
        assert total.dtype == wide
        seen[index] = total.item()
        return buffers[index].copy_(total)

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        bit = int(m["x"])
        leaves = [leaf for index, leaf in enumerate(p) if index & bit]
        return torch.stack(leaves).sum(0).float() * m["x"]

    # With the last microbatch alone, and with three: bits 0 and 1 come from the first two.
    for group, earlier_bits in (
        (GROUP[2:], 0),
        (GROUP, 3),
    ):
        run = partial(
            accumulate_group,
            make_backends(loss_fn, ps.grad_and_value),
            *ps.tree.flatten(params),
            with_weights(group, weigh_by_one),
            weight_fn=weigh_by_one,
            divisors=None,
            accum_dtype=accum_dtype,
        )
        seen.clear()
        with_ready = run(on_grad_ready=ready).grads
        without = run().grads

        assert {*seen} == {4, 5, 6, 7}
        for index, total in seen.items():
            assert total == 4 + (index & earlier_bits)
            assert with_ready[index].data_ptr() == buffers[index].data_ptr()
        expected = [index & (4 + earlier_bits) for index in range(8)]
        for grads in (with_ready, without):
            assert torch.cat(grads).tolist() == expected
            assert len({grad.data_ptr() for grad in grads}) == 8


class Dot(torch.autograd.Function):
    """Returns a saved tensor from its backward pass."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum().view(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.detach(), None


@dataclass
class Rows:
    x: Any


@pytest.mark.parametrize(
    "make", [Rows, lambda x: Rows([{"x": x}]), lambda x: UserDict(x=x)]
)
def test_a_gradient_that_is_in_an_object_of_the_data(make: Callable[..., Any]) -> None:
    """Later microbatches do not add to it."""
    apply: Any = Dot.apply
    rows = [torch.ones(2), torch.ones(2)]
    group = [make(x) for x in rows]

    def loss_fn(w: Tensor, m: Any) -> Any:
        return apply(w, *tensors_in(m))

    w = torch.ones(2)
    weights = torch.ones(1)
    sums = ps.accumulate(loss_fn, w, group, weight_fn=lambda m: weights)
    assert sums.grads.tolist() == [2, 2]
    assert_same(rows, [torch.ones(2)] * 2)


# torch's compiler instantiates a Function, and warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("way", ["plain", "recorded", "compiled"])
@pytest.mark.parametrize("of", ["x", "w"])
def test_a_gradient_that_is_the_data(normalize: Any, k: int, way: str, of: str) -> None:
    """Neither sums nor clipping write to a gradient that is the data, or the params."""
    apply: Any = Dot.apply
    compile: Any = False
    if way == "compiled":
        compile = AOT_EAGER

    def loss_fn(w: Tensor, m: Any) -> Tensor:
        inputs = {"w": w.detach(), **m}
        return apply(w, inputs[of]) + m["z"]

    clip = ps.optim.clip_by_global_norm(1e-3)
    optimizer = ps.optim.chain(clip, ps.optim.sgd(1.0))
    step = ps.make_update_step(
        loss_fn,
        optimizer,
        weight_fn=lambda _: torch.ones(1),
        normalize=normalize,
        compile=compile,
    )
    z = torch.zeros((), requires_grad=way == "recorded")
    w = torch.tensor([1.0, 2.0])
    x = torch.tensor([1.0, 2.0])
    m = {"x": x, "z": z}
    state = optimizer.init(w)
    new, _, _ = step(w, state, [m] * k)
    scale = 1e-3 / 5**0.5
    torch.testing.assert_close(new, w * (1 - scale))
    assert w.tolist() == [1, 2]
    assert x.tolist() == [1, 2]


Func = Callable[..., Any]
Run = Callable[[Func, list[Tensor]], Any]


def with_run(run: Run) -> Any:
    """Makes a ``grad_and_value`` that calls ``run(func, leaves)``."""

    def grad_and_value(func: Func, /, argnums: Any = 0, has_aux: bool = False) -> Any:
        assert argnums == 0
        assert has_aux is True
        return lambda leaves: run(func, leaves)

    return grad_and_value


def sum_with(run: Run, dtype: torch.dtype = torch.float32) -> ps.GradSums:
    """Accumulates a linear loss, differentiated by ``run``."""

    def loss_fn(w: Tensor, m: Batch) -> Tensor:
        return w * m["x"]

    w = torch.ones(1, dtype=dtype)
    return ps.accumulate(
        loss_fn, w, GROUP, weight_fn=weigh_by_one, grad_and_value=with_run(run)
    )


@pytest.mark.parametrize("compile", [False, AOT_EAGER])
def test_it_differentiates_a_function_of_the_list_of_leaves(compile: Any) -> None:
    """Calls it as ``torch.func.grad_and_value`` is called, whose answer is the step's, to the bit."""
    seen: list[Any] = []

    def run(func: Func, leaves: list[Tensor]) -> Any:
        shapes = [leaf.shape for leaf in leaves]
        seen.append((type(leaves), shapes))
        return torch.func.grad_and_value(func, has_aux=True)(leaves)

    def loss_fn(params: Batch, m: Batch) -> ps.LossOutput:
        scores = params["w"] * m["x"]
        losses = scores.square() + params["b"]
        total = losses.detach().sum()
        return ps.LossOutput(losses, aux={"sum": total})

    sgd = ps.optim.sgd(0.5)
    params = {"w": torch.ones(1), "b": torch.zeros(())}

    def take_step(**settings: Any) -> Any:
        step: Any = ps.make_update_step(
            loss_fn, sgd, weight_fn=weigh_by_one, **settings
        )
        state = sgd.init(params)
        return step(params, state, GROUP)

    by_run = take_step(grad_and_value=with_run(run), compile=compile)
    assert_same(by_run, take_step())
    assert (list, [(), (1,)]) in seen


def compile_into_buffers(function: Any, **settings: Any) -> Any:
    """Compiles a function to one that returns its results in the same memory at each call."""
    compiled = AOT_EAGER(function, **settings)
    buffers: dict[Any, list[Tensor]] = {}

    def run(*args: Any) -> Any:
        sums, result = compiled(*args)
        new, spec = tree.flatten(result._replace(depends_on_params=()))
        num_args = len(tree.leaves(args))
        if num_args not in buffers:
            buffers[num_args] = tree.map(torch.clone, new)
        old = buffers[num_args]
        for buffer, x in zip(old, new, strict=True):
            buffer.copy_(x)
        reused = tree.unflatten(spec, old)
        depends = result.depends_on_params
        return sums, reused._replace(depends_on_params=depends)

    return run


@pytest.mark.parametrize("weighs", [False, True])
def test_a_compiler_that_reuses_the_memory_of_results(weighs: bool) -> None:
    """As CUDA graphs do: losses, weights and aux are copied."""

    def loss_fn(w: Tensor, m: Batch) -> ps.LossOutput:
        x = m["x"]
        weights = None
        if weighs:
            weights = x > 1
        return ps.LossOutput(w * x, aux=x.sum(), weights=weights)

    weight_fn: Any = weigh_by_one
    if weighs:
        weight_fn = None
    sgd = ps.optim.sgd(1.0)
    settings: Any = {
        "loss_fn": loss_fn,
        "optimizer": sgd,
        "weight_fn": weight_fn,
        "normalize": "grads",
    }
    w = torch.ones(1)
    state = sgd.init(w)
    plain = ps.make_update_step(**settings)(w, state, GROUP)
    compiled = ps.make_update_step(**settings, compile=compile_into_buffers)
    assert_same(compiled(w, state, GROUP), plain)


def test_what_it_returns_is_what_is_added() -> None:
    """Such as a microbatch's gradient, shortened to the length 1."""

    def run(func: Func, leaves: list[Tensor]) -> Any:
        differentiate = torch.func.grad_and_value(func, has_aux=True)
        grads, value_and_aux = differentiate(leaves)
        clipped = [grad / grad.norm().clamp(min=1) for grad in grads]
        return clipped, value_and_aux

    sums = sum_with(run)
    assert float(sums.grads) == 3
    assert float(sums.loss) == 7
    assert float(sums.counts.num_tokens) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_reuses_its_buffers(dtype: torch.dtype) -> None:
    """Copies gradient and loss before those of the next microbatch overwrite them."""
    grad_buffer = torch.empty(1, dtype=dtype)
    loss_buffer = torch.empty(())

    def run(func: Func, leaves: list[Tensor]) -> Any:
        differentiate = ps.grad_and_value(func, has_aux=True)
        (grad,), (loss, aux) = differentiate(leaves)
        grad_buffer.copy_(grad)
        loss_buffer.copy_(loss)
        return [grad_buffer], (loss_buffer, aux)

    sums = sum_with(run, dtype)
    assert sums.grads == sums.loss == 7
