"""Each microbatch has leaves for itself alone, and every sum has its memory, also by a ``grad_and_value`` of the user's.

T1 says so of losses that do what they like to their leaves. Here stands what no equation shows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep.counts import with_weights
from purestep.grads.accumulate import accumulate_group
from purestep.grads.backends import make_backends
from purestep.tree import accumulation_dtype
from purestep.types import GradHook
from tests.memory import LiveBytes
from tests.squares import WAYS, squares, x_ones

GROUP = [{"x": torch.tensor([2.0**m])} for m in range(3)]


def test_what_a_loss_keeps_of_its_leaves_is_a_constant_later() -> None:
    kept: list[Tensor] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        kept.append(w)
        return m["x"] * w * kept[0]

    group = [{"x": torch.ones(1)}] * 3
    assert (
        ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones).grads
        == 2 + 1 + 1
    )


def test_a_hook_after_accumulation_sees_the_sum() -> None:
    seen: list[float] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.item()))
        return w * m["x"]

    assert ps.accumulate(loss_fn, torch.ones(1), GROUP, weight_fn=x_ones).grads == 7
    assert seen == [1, 3, 7]


def test_autocast_keeps_no_casts_of_leaves() -> None:
    """They go with the microbatch, in a long-lived autocast too: the sums are what stays."""
    w, x = torch.ones(64, 64), torch.ones(2, 64, dtype=torch.bfloat16)
    how: Any = {"weight_fn": lambda m: torch.ones(2)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with LiveBytes() as live:
                sums = ps.accumulate(
                    lambda w, m: (m @ w).float().sum(1), w, [x] * 2, **how
                )
            assert sums.grads.nbytes <= live.now < 1.2 * w.nbytes < live.peak


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", ["w", "beside"])
def test_params_are_not_written_to(
    how: dict[str, Any], recorded: bool, name: str
) -> None:
    """Neither to one that the loss needs nor to one beside it."""

    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            p[name].lerp_(m["x"], 0.5)
        return squares(p["w"], m)

    made = {key: torch.zeros(1, requires_grad=recorded) for key in ("beside", "w")}
    params = {key: leaf.clone() for key, leaf in made.items()}
    with pytest.raises(
        ValueError, match=rf"loss_fn wrote to params\['{name}'\] in place"
    ):
        ps.accumulate(loss_fn, params, [{"x": torch.ones(1)}], weight_fn=x_ones, **how)


def test_evaluation_does_not_mark_its_data() -> None:
    m = {"x": torch.ones(2)}
    evaluate = ps.make_eval_step(
        lambda w, m: w * m["x"].requires_grad_(), weight_fn=x_ones
    )
    evaluate(torch.tensor(1.0), [m])
    assert not m["x"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accum_dtype", [None, torch.float64])
def test_a_sum_that_is_ready_is_taken(dtype: torch.dtype, accum_dtype: Any) -> None:
    """Once, when it is final, and it lies where it was taken to; others have their own memory.

    Where bit m of i is set, leaf i has a gradient of 2 ** m in microbatch m.
    """
    params = [torch.ones(1, dtype=dtype) for _ in range(8)]
    wide = accum_dtype or accumulation_dtype(dtype)
    places = torch.zeros(8, 1, dtype=wide).unbind()
    seen: dict[int, float] = {}

    def ready(index: int, total: Tensor) -> Tensor:
        assert index not in seen
        assert total.dtype == wide
        seen[index] = total.item()
        return places[index].copy_(total)

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        parts = [leaf for i, leaf in enumerate(p) if i & int(m["x"])]
        return torch.stack(parts).sum(0).float() * m["x"]

    def run(group: Any, on_grad_ready: GradHook | None = None) -> ps.GradSums:
        return accumulate_group(
            make_backends(loss_fn, ps.grad_and_value),
            params,
            with_weights(group, x_ones),
            weight_fn=x_ones,
            total=None,
            accum_dtype=accum_dtype,
            on_grad_ready=on_grad_ready,
        )

    for group, earlier in ((GROUP[2:], 0), (GROUP, 3)):
        seen.clear()
        taken = run(group, on_grad_ready=ready).grads
        assert all(
            taken[index].data_ptr() == places[index].data_ptr() for index in seen
        )
        assert seen == {index: 4 + (index & earlier) for index in (4, 5, 6, 7)}
        for grads in (taken, run(group).grads):
            assert torch.cat(grads).tolist() == [
                index & (4 + earlier) for index in range(8)
            ]
            assert len({grad.data_ptr() for grad in grads}) == 8


class Dot(torch.autograd.Function):
    """Its backward pass returns a tensor that it has saved."""

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


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated"
)  # what torch's compiler does
@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("way", ["plain", "recorded", "compiled"])
@pytest.mark.parametrize("of", ["x", "w"])
def test_a_gradient_that_is_the_data(normalize: Any, k: int, way: str, of: str) -> None:
    """Neither data nor params are written to, by sums or by clipping."""
    apply: Any = Dot.apply
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1e-3), ps.optim.sgd(1.0))
    compile = (
        partial(torch.compile, backend="aot_eager") if way == "compiled" else False
    )
    how: Any = {
        "weight_fn": lambda _: torch.ones(1),
        "normalize": normalize,
        "compile": compile,
    }

    def loss_fn(w: Tensor, m: Any) -> Tensor:
        return apply(w, {"w": w.detach(), **m}[of]) + m["z"]

    step = ps.make_update_step(loss_fn, optimizer, **how)
    z = torch.zeros((), requires_grad=way == "recorded")
    w, m = torch.tensor([1.0, 2.0]), {"x": torch.tensor([1.0, 2.0]), "z": z}
    new, _, _ = step(w, optimizer.init(w), [m] * k)
    torch.testing.assert_close(new, w * (1 - 1e-3 / 5**0.5))
    assert w.tolist() == m["x"].tolist() == [1, 2]


Run = Callable[[Callable[..., Any], list[Tensor]], Any]


def with_run(run: Run) -> Any:
    """A ``grad_and_value`` that runs ``run(func, leaves)``."""

    def mine(
        func: Callable[..., Any], /, argnums: Any = 0, has_aux: bool = False
    ) -> Any:
        assert (argnums, has_aux) == (0, True)
        return lambda leaves: run(func, leaves)

    return mine


def sums_by(run: Run, dtype: torch.dtype = torch.float32) -> ps.GradSums:
    how, w = (
        {"weight_fn": x_ones, "grad_and_value": with_run(run)},
        torch.ones(1, dtype=dtype),
    )
    return ps.accumulate(lambda w, m: w * m["x"], w, GROUP, **how)


@pytest.mark.parametrize(
    "compile", [False, partial(torch.compile, backend="aot_eager")]
)
def test_it_differentiates_a_function_of_the_list_of_leaves(compile: Any) -> None:
    """The very call of ``torch.func.grad_and_value``, whose answer is the step's, to the bit."""
    seen: list[Any] = []

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        seen.append((type(leaves), [leaf.shape for leaf in leaves]))
        return torch.func.grad_and_value(func, has_aux=True)(leaves)

    def loss_fn(params: dict[str, Tensor], m: dict[str, Tensor]) -> ps.LossOutput:
        losses = (params["w"] * m["x"]).square() + params["b"]
        return ps.LossOutput(losses, aux={"sum": losses.detach().sum()})

    sgd, params = ps.optim.sgd(0.5), {"w": torch.ones(1), "b": torch.zeros(())}
    one, other = (
        ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, **how)(
            params, sgd.init(params), GROUP
        )
        for how in ({"grad_and_value": with_run(run), "compile": compile}, {})
    )
    assert_same(one, other)
    assert (list, [(), (1,)]) in seen


def test_what_it_returns_is_what_is_added() -> None:
    """One that shortens a microbatch's gradient to the length 1, say."""

    def shortened(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        grads, beside = torch.func.grad_and_value(func, has_aux=True)(leaves)
        return [grad / grad.norm().clamp(min=1) for grad in grads], beside

    sums = sums_by(shortened)
    assert [
        float(each) for each in (sums.grads, sums.loss, sums.counts.num_tokens)
    ] == [3, 7, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_reuses_its_buffers(dtype: torch.dtype) -> None:
    """Gradient and loss are copied before those of the next microbatch take their place."""
    buffer, value = torch.empty(1, dtype=dtype), torch.empty(())

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        (grad,), (loss, beside) = ps.grad_and_value(func, has_aux=True)(leaves)
        return [buffer.copy_(grad)], (value.copy_(loss), beside)

    sums = sums_by(run, dtype)
    assert sums.grads == sums.loss == 7
