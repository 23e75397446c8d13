"""Reverse mode and accumulation: what they refuse, and parts of their contracts beside T1 to T9."""

from __future__ import annotations

import contextlib
import weakref
from collections import UserDict
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import tree
from tests.torch_internals import TorchDispatchMode


def weight_fn(microbatch: Tensor) -> Tensor:
    return torch.ones_like(microbatch)


def test_only_scalars_have_gradients() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\)\. Perhaps it returns aux as well"):
        ps.grad_and_value(lambda x: x)(torch.ones(3))
    with pytest.raises(ValueError, match="the function gave tuple"):
        ps.grad_and_value(lambda x: (x.sum(), x))(torch.ones(3))
    with pytest.raises(ValueError, match=r"must return \(value, aux\), got Tensor"):
        ps.grad_and_value(lambda x: x.sum(), has_aux=True)(torch.ones(3))


def test_argnums() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y * y).sum()

    x, y = torch.tensor(2.0), torch.tensor(3.0)
    assert ps.grad_and_value(f, argnums=-1)(x, y)[0] == 12
    assert ps.grad_and_value(f, argnums=(1, 0))(x, y)[0] == (12, 9)
    with pytest.raises(ValueError, match="argnums=2 needs more than the 2 arguments"):
        ps.grad_and_value(f, argnums=2)(x, y)


def test_registered_classes_and_none() -> None:
    dataclass: Any = optree.dataclasses.dataclass

    @dataclass(namespace=tree.NAMESPACE)
    class Affine:
        weight: Tensor
        bias: Tensor | None = None

    grads, value = ps.grad_and_value(lambda p: (p.weight**2).sum())(Affine(torch.tensor([3.0])))
    assert value == 9
    assert torch.equal(grads.weight, torch.tensor([6.0]))
    assert grads.bias is None


def test_accumulate_is_a_plain_sum_without_a_count() -> None:
    grads, loss, _, aux = ps.accumulate(
        lambda w, m: w * m,
        torch.tensor(2.0),
        [torch.tensor([1.0, 2.0]), torch.tensor([4.0])],
        weight_fn=weight_fn,
    )
    assert (float(grads), float(loss), aux) == (7.0, 14.0, ())


def test_unused_leaves_and_empty_groups_are_exact_zeros() -> None:
    params = {"used": torch.tensor(2.0), "unused": torch.ones(3, dtype=torch.bfloat16)}
    for group in ([torch.tensor([1.0])], []):
        grads, *_ = ps.accumulate(lambda p, m: p["used"] * m, params, group, weight_fn=weight_fn)
        assert torch.equal(grads["unused"], torch.zeros(3))
        assert grads["unused"].dtype == torch.float32


@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64])
def test_accum_dtype(asked: torch.dtype | None) -> None:
    params = [
        torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    group = [torch.ones(2), torch.ones(2)]
    grads, loss, *_ = ps.accumulate(
        lambda p, m: sum(p) * m, params, group, weight_fn=weight_fn, accum_dtype=asked
    )
    wide = [torch.float32, torch.float32, torch.float64]
    assert [grad.dtype for grad in grads] == [asked or own for own in wide]
    assert loss.dtype == torch.float64


def test_any_grad_and_value() -> None:
    """One that does as it likes with its inputs still has its gradients added up."""
    params, group = {"w": torch.zeros(2)}, [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.3, 0.4]])]
    grads, *_ = ps.accumulate(
        lambda p, x: x @ p["w"],
        params,
        group,
        weight_fn=lambda x: torch.ones(len(x)),
        grad_and_value=ps.per_example(clip=1.0),
    )
    assert torch.allclose(grads["w"], torch.tensor([0.9, 1.2]))


def test_aux_sums_wide() -> None:
    """Flags are counted, halves are summed in float32; None is no aux."""

    def loss_fn(w: Tensor, m: Tensor) -> ps.LossTerms:
        return ps.LossTerms(w * m, aux={"flag": m[0] > 0, "half": m[0].to(torch.float16)})

    *_, aux = ps.accumulate(loss_fn, torch.tensor(1.0), [torch.ones(1)] * 3000, weight_fn=weight_fn)
    assert aux["flag"] == 3000
    assert aux["half"] == 3000

    def no_aux(w: Tensor, m: Tensor) -> ps.LossTerms:
        return ps.LossTerms(w * m, aux=None)

    assert ps.accumulate(no_aux, torch.tensor(1.0), [torch.ones(1)], weight_fn=weight_fn).aux == ()


def accumulate_one(terms: Any, **how: Any) -> Any:
    """One microbatch of these terms."""
    return ps.accumulate(
        lambda w, m: terms, torch.ones(2), [torch.ones(2)], **{"weight_fn": weight_fn, **how}
    )


def test_refuses_aux_that_is_no_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"LossTerms\.aux\['n'\] must be a tensor, got int; wrap it"
    ):
        accumulate_one(ps.LossTerms(torch.ones(2), aux={"n": 3}))


def test_refuses_a_microbatch_term_per_token() -> None:
    with pytest.raises(ValueError, match=r"microbatch must be a scalar tensor, got shape \(2,\)"):
        accumulate_one(ps.LossTerms(torch.ones(2), microbatch=torch.ones(2)))


def test_refuses_a_microbatch_term_without_a_count() -> None:
    with pytest.raises(ValueError, match='known before the backward pass: use normalize="loss"'):
        accumulate_one(ps.LossTerms(torch.ones(2), microbatch=torch.ones(())))


def test_weights_come_once() -> None:
    with pytest.raises(ValueError, match="the weights come twice"):
        accumulate_one(ps.LossTerms(torch.ones(2), weights=torch.ones(2)))
    with pytest.raises(ValueError, match="weight_fn=None needs a loss_fn that returns LossTerms"):
        accumulate_one(torch.ones(2), weight_fn=None)


def test_the_function_that_is_differentiated_runs_once_per_microbatch() -> None:
    """No forward pass is spent on counting."""
    for how in ({"normalize": "loss"}, {"normalize": "grads"}):
        calls = []

        def loss_fn(w: Tensor, m: Tensor) -> Tensor:
            calls.append(m)  # noqa: B023
            return w * m

        step = ps.make_update_step(loss_fn, ps.optim.sgd(0.1), weight_fn=weight_fn, **how)  # type: ignore[arg-type]
        w = torch.tensor(1.0)
        step(w, ps.optim.sgd(0.1).init(w), [torch.ones(2)] * 3)
        assert len(calls) == 3


def squares(w: Tensor, m: dict[str, Tensor]) -> Tensor:
    return (w * m["x"]).square()


def x_ones(microbatch: dict[str, Tensor]) -> Tensor:
    return torch.ones_like(microbatch["x"])


def test_what_the_loss_closes_over_is_a_constant() -> None:
    """Right values, nothing recorded, and no ``.grad`` written; an argument of the step is differentiated."""
    temperature = torch.tensor(3.0, requires_grad=True)
    w, group = torch.tensor([2.0]), [{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}]

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        losses = temperature * squares(w, m)
        return ps.LossTerms(losses, aux=losses.sum())

    grads, loss, _, aux = ps.accumulate(loss_fn, w, group, weight_fn=x_ones)
    assert grads == 2 * 3 * 2 * (1 + 4)
    assert loss == aux == 3 * 4 * (1 + 4)
    assert not any(value.requires_grad for value in (grads, loss, aux))
    assert temperature.grad is None
    given = [{**m, "temperature": temperature} for m in group]
    grads, *_ = ps.accumulate(
        lambda w, m: m["temperature"] * squares(w, m), w, given, weight_fn=x_ones
    )
    grads.sum().backward()
    assert temperature.grad == 2 * 2 * (1 + 4)
    with pytest.raises(ValueError, match="cannot record the gradients: detach them"):
        ps.accumulate(
            lambda w, m: m["temperature"] * squares(w, m),
            w,
            given,
            weight_fn=x_ones,
            out=[torch.zeros(1)],
        )


def test_an_outer_derivative_by_the_data() -> None:
    """A microbatch may require grad, the second one alone too: dataset distillation, say."""
    x = torch.tensor([2.0], requires_grad=True)
    group = [{"x": torch.tensor([1.0])}, {"x": x}]
    ps.accumulate(squares, torch.tensor([3.0]), group, weight_fn=x_ones)[0].sum().backward()
    assert x.grad == 2 * 3 * 2 * 2


def test_forward_mode_reaches_through() -> None:
    """Dual numbers without functorch: the parameters' tangents are not lost."""
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        w = forward_ad.make_dual(torch.tensor([3.0]), torch.tensor([1.0]))
        grads, *_ = ps.accumulate(squares, w, [{"x": torch.tensor([2.0])}], weight_fn=x_ones)
        assert forward_ad.unpack_dual(grads).tangent == 2 * 4


def test_gradients_are_taken_without_grad_mode() -> None:
    """As ``torch.func.grad``: what the caller's mode says is about the caller's graph."""
    w, group = torch.tensor([3.0]), [{"x": torch.tensor([2.0])}]
    with torch.no_grad():
        assert ps.accumulate(squares, w, group, weight_fn=x_ones)[0] == 2 * 3 * 4


def test_a_gradient_shared_by_two_leaves_is_two_sums() -> None:
    """Autograd hands the same tensor to both; nobody adds to it in place."""
    params = [torch.zeros(2), torch.zeros(2)]
    group = [{"x": torch.ones(2)}] * 3
    grads, *_ = ps.accumulate(
        lambda p, m: p[0] + p[1] * 1 + 0 * m["x"], params, group, weight_fn=x_ones
    )
    assert torch.equal(torch.stack(grads), torch.full((2, 2), 3.0))
    assert grads[0].data_ptr() != grads[1].data_ptr()


@pytest.mark.parametrize("out", [None, [torch.zeros(1) for _ in range(3)]])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_gradient_whose_memory_two_leaves_share_is_two_sums(number: int, out: Any) -> None:
    """Autograd hands views of one tensor to all that were stacked. Its own sums are wrong from the second pass on."""
    params = [torch.ones(1) for _ in range(3)]
    group = [{"x": torch.tensor([2.0**m]), "first": m > 0} for m in range(number)]

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        return torch.stack(p[m["first"] :]).sum(0) * m["x"]

    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones, out=out)
    assert [grad.item() for grad in grads] == [1, 2**number - 1, 2**number - 1]
    assert len({grad.data_ptr() for grad in grads}) == 3


def test_a_gradient_that_somebody_keeps_is_not_added_to() -> None:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
            ctx.kept = kept
            return (x * kept).sum(0, keepdim=True)

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> Any:
            return ctx.kept.view(-1), None

    kept = torch.tensor([2.0, 3.0])
    grads, *_ = ps.accumulate(
        lambda w, m: Kept.apply(w, kept) * m["x"],
        torch.ones(2),
        [{"x": torch.ones(1)}] * 3,
        weight_fn=x_ones,
    )
    assert grads.tolist() == [6, 9]
    assert kept.tolist() == [2, 3]


def test_sparse_gradients_arrive_dense() -> None:
    table, group = torch.zeros(4, 2), [{"x": torch.tensor([1, 1])}, {"x": torch.tensor([3, 0])}]

    def loss_fn(table: Tensor, m: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.embedding(m["x"], table, sparse=True).sum(-1)

    grads, *_ = ps.accumulate(loss_fn, table, group, weight_fn=x_ones)
    assert grads.layout == torch.strided
    assert grads.sum(1).tolist() == [2, 4, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_ready(dtype: torch.dtype) -> None:
    """Sums stand in the buffers, whatever those held; a leaf is announced once, when it is final."""
    params = {
        "a": torch.ones(2, dtype=dtype),
        "b": torch.ones(2, dtype=dtype),
        "unused": torch.ones(1),
    }
    out = [torch.full((2,), 7.0), torch.full((2,), float("nan")), torch.full((1,), 7.0)]
    seen: dict[int, list[float]] = {}

    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        return (p["a"] * m["x"] + (p["b"] if len(m) > 1 else 0)).float()

    group = [{"x": torch.ones(2), "y": torch.ones(2)}, {"x": 2 * torch.ones(2)}]

    def ready(index: int) -> None:
        assert index not in seen
        seen[index] = out[index].tolist()

    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones, out=out, ready=ready)
    assert [leaf.tolist() for leaf in out] == [[3, 3], [1, 1], [0]]
    assert all(grads[name] is out[i] for i, name in enumerate(sorted(grads)))
    assert seen == {0: [3, 3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("announced", [True, False])
def test_out_of_leaves_that_some_microbatches_leave_out(
    dtype: torch.dtype, announced: bool
) -> None:
    """Experts of a mixture, say: leaf i takes part in microbatch m where bit m of i is set, with a gradient of 2 ** m."""
    params = [torch.ones(1, dtype=dtype) for _ in range(8)]
    out = [torch.full((1,), float("nan")) for _ in params]
    group = [{"x": torch.tensor([2.0**m]), "bit": m} for m in range(3)]
    seen = []

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        parts = [leaf for i, leaf in enumerate(p) if i >> m["bit"] & 1]
        return torch.stack(parts).sum(0).float() * m["x"]

    def ready(index: int) -> None:
        assert out[index] == index
        seen.append(index)

    ps.accumulate(
        loss_fn, params, group, weight_fn=x_ones, out=out, ready=ready if announced else None
    )
    assert torch.cat(out).tolist() == list(range(8))
    assert sorted(seen) == ([4, 5, 6, 7] if announced else [])


class First(torch.autograd.Function):
    """The first of two, and no gradient for the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffers", [True, False])
def test_a_gradient_that_is_none_is_zero(dtype: torch.dtype, buffers: bool) -> None:
    params = [torch.ones(1, dtype=dtype) for _ in range(2)]
    out = [torch.full((1,), float("nan")) for _ in params] if buffers else None
    grads, *_ = ps.accumulate(
        lambda p, m: First.apply(*p).float() * m["x"],
        params,
        [{"x": torch.ones(1)}] * 2,
        weight_fn=x_ones,
        out=out,
        ready=(lambda index: None) if buffers else None,
    )
    assert [grad.item() for grad in grads] == [2, 0]


def test_out_in_a_dtype_of_its_own() -> None:
    out = [torch.full((1,), float("nan"), dtype=torch.float64)]
    group = [{"x": torch.ones(1)}] * 3
    grads, *_ = ps.accumulate(squares, torch.ones(1), group, weight_fn=x_ones, out=out)
    assert grads is out[0]
    assert grads == 6


def test_gradients_are_taken_in_inference_mode() -> None:
    with torch.inference_mode():
        made_inside = torch.tensor([3.0])
        for w in (made_inside, torch.tensor([3.0])):
            assert ps.accumulate(squares, w, [{"x": torch.ones(1)}], weight_fn=x_ones)[0] == 6
    assert ps.accumulate(squares, made_inside, [{"x": torch.ones(1)}], weight_fn=x_ones)[0] == 6


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_a_checkpoint_of_a_function_that_closes_over_params(
    reentrant: bool, announced: bool
) -> None:
    """Right, or refused: a reentrant one runs a backward pass of its own."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        x = m["x"] + 0 * w
        for _ in range(2):
            x = checkpoint(lambda y: y * w, x, use_reentrant=reentrant)
        return x

    w, group = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3
    out = [torch.zeros(1)] if announced else None
    refused = pytest.raises(ValueError, match="use_reentrant=False")
    with refused if reentrant else contextlib.nullcontext():
        grads, *_ = ps.accumulate(
            loss_fn, w, group, weight_fn=x_ones, out=out, ready=lambda index: None
        )
        assert grads == 18


class Reversible(torch.autograd.Function):
    """x w, with a backward pass of its own inside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x * w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(x * ctx.w, grad)
        return x.grad, None


def test_a_function_with_a_backward_pass_of_its_own() -> None:
    """Its leaf is given gradients several times in one pass: right where nobody waits, refused where someone does."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        return Reversible.apply(Reversible.apply(m["x"] + 0 * w, w), w)

    w, group, out = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3, [torch.zeros(1)]
    assert ps.accumulate(loss_fn, w, group, weight_fn=x_ones)[0] == 18
    assert ps.accumulate(loss_fn, w, group, weight_fn=x_ones, out=out)[0] == 18
    with pytest.raises(RuntimeError, match="given a gradient twice in one backward pass"):
        ps.accumulate(loss_fn, w, group, weight_fn=x_ones, out=out, ready=lambda index: None)


@pytest.mark.parametrize("way", ["own", "torch.func", "vmap", "grad", "inference"])
def test_a_loss_that_does_not_reach_params(way: str) -> None:
    """Refused where there are tokens, of the group as a whole; single leaves and microbatches need not be reached."""
    how: Any = {"grad_and_value": torch.func.grad_and_value} if way == "torch.func" else {}
    params = {"a": torch.ones(2), "b": torch.ones(2)}

    def gradients(loss_fn: Any, group: list[Tensor], weight: float = 1.0) -> Any:
        def run(params: Any) -> Any:
            return ps.accumulate(
                loss_fn, params, group, weight_fn=lambda m: torch.full_like(m, weight), **how
            )[0]

        if way == "vmap":
            return torch.vmap(run, randomness="error")(
                {name: leaf.expand(3, 2) for name, leaf in params.items()}
            )
        if way == "grad":
            return torch.func.grad(lambda p: sum(leaf.sum() for leaf in run(p).values()))(params)
        with torch.inference_mode(way == "inference"):
            return run(params)

    group = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])]

    def without_grad(p: Any, m: Tensor) -> Any:
        with torch.no_grad():
            return p["a"] * m

    for loss_fn in (lambda p, m: (p["a"] * m).detach(), lambda p, m: m * 1, without_grad):
        with pytest.raises(ValueError, match="losses that do not depend on params"):
            gradients(loss_fn, group)
        gradients(loss_fn, group, weight=0.0)
    gradients(lambda p, m: p["a"] ** 2 * m, group)
    gradients(lambda p, m: p["a"] ** 2 * m if m.ndim == 2 else m * 1, group)


def test_a_loss_that_writes_to_params() -> None:
    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            p["running"].lerp_(m["x"], 0.5)
        return squares(p["w"], m)

    params = {"running": torch.zeros(1), "w": torch.ones(1)}
    with pytest.raises(ValueError, match=r"loss_fn wrote to params\['running'\] in place"):
        ps.accumulate(loss_fn, params, [{"x": torch.ones(1)}], weight_fn=x_ones)


def test_a_loss_that_freezes_a_leaf() -> None:
    """For its own microbatch alone."""

    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        if m["x"] == 1:
            p[0].requires_grad_(False)
        return (p[0] + p[1]) * m["x"]

    group = [{"x": torch.tensor([x])} for x in (1.0, 2.0, 1.0)]
    for out in (None, [torch.zeros(1), torch.zeros(1)]):
        grads, *_ = ps.accumulate(
            loss_fn, [torch.ones(1), torch.ones(1)], group, weight_fn=x_ones, out=out
        )
        assert [grad.item() for grad in grads] == [2, 4]


def test_a_loss_that_gives_a_leaf_other_values() -> None:
    """For its own microbatch alone: each begins with the params as they were given."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.data = 2 * w.data
        return w.square() * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    params = torch.ones(1)
    grads, loss, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones)
    assert [grads.item(), loss.item(), params.item()] == [2 * 2 * 7, 4 * 7, 1]


def test_a_hook_acts_on_its_own_microbatch() -> None:
    """Not on those that come later, whose losses put hooks there themselves."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.register_hook(lambda grad: 2 * grad)
        return w * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    assert ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones).grads == 14


def test_what_a_loss_keeps_of_its_leaves_is_a_constant_later() -> None:
    """The leaves of one microbatch are not those of the next."""
    kept: list[Tensor] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        kept.append(w)
        return m["x"] * w * kept[0]

    group = [{"x": torch.ones(1)}] * 3
    assert ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones).grads == 2 + 1 + 1


def test_a_reverse_mode_that_reuses_the_buffer_of_its_value() -> None:
    """The loss of one microbatch is copied before that of the next takes its place."""
    value = torch.empty(())

    def mine(func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
        def run(leaves: list[Tensor], microbatch: Any) -> Any:
            grads, (loss, aux) = ps.grad_and_value(func, has_aux=True)(leaves, microbatch)
            return grads, (value.copy_(loss), aux)

        return run

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    sums = ps.accumulate(
        lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones, grad_and_value=mine
    )
    assert sums.loss == 7


def test_a_tangent_that_is_not_finite_is_taken_away_with_its_loss() -> None:
    """At weight 0 also in forward mode, where the loss itself is finite."""

    def loss(z: Tensor) -> Tensor:
        group = [{"x": torch.ones(3), "z": z, "w": torch.tensor([1.0, 1.0, 0.0])}]
        sums = ps.accumulate(
            lambda w, m: w * m["x"] + m["z"].sqrt(),
            torch.ones(()),
            group,
            weight_fn=lambda m: m["w"],
        )
        return sums.loss

    given = (torch.tensor([1.0, 4.0, 0.0]),), (torch.ones(3),)
    assert torch.func.jvp(loss, *given)[1] == 0.5 + 0.25


def test_what_a_hook_keeps_is_its_own() -> None:
    """The gradient of one microbatch, whatever is added later."""
    kept: list[Any] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.register_post_accumulate_grad_hook(lambda leaf: kept.append(leaf.grad))
        return w * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    grads, *_ = ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones)
    assert grads == 7
    assert [grad.item() for grad in kept] == [1, 2, 4]


def test_losses_are_summed_in_float64() -> None:
    """2²⁴ and a thousand ones, which float32 would lose one by one."""
    group = [{"x": torch.tensor([x])} for x in [2.0**24] + [1.0] * 1000]
    for run in (torch.no_grad(), contextlib.nullcontext()):
        with run:
            _, loss, *_ = ps.accumulate(
                lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones
            )
        assert loss.dtype == torch.float32
        assert loss == 2**24 + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reverse_mode_that_reuses_its_buffer(dtype: torch.dtype) -> None:
    """What is returned is copied before the next microbatch writes over it."""
    buffer = torch.empty(1, dtype=dtype)

    def mine(func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
        def run(leaves: list[Tensor], microbatch: Any) -> Any:
            return [buffer.copy_(microbatch["x"])], func(leaves, microbatch)

        return run

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    grads, *_ = ps.accumulate(
        lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones, grad_and_value=mine
    )
    assert grads == 7


def test_half_precision_is_summed_wide_under_vmap() -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    group = [{"x": torch.tensor([x], dtype=torch.bfloat16)} for x in (256.0, 1.0, 1.0)]

    def run(w: Tensor) -> Tensor:
        return ps.accumulate(lambda w, m: w * m["x"], w, group, weight_fn=x_ones)[0]

    grads = torch.vmap(run)(torch.ones(2, 1, dtype=torch.bfloat16))
    assert grads.dtype == torch.float32
    assert grads.flatten().tolist() == [258, 258]


def test_buffers_of_any_strides() -> None:
    """Whatever the memory order of leaves, of buffers, and of the gradients between them."""
    for leaf in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 6)[:, ::2]):
        for place in (torch.empty(2, 3), torch.empty(3, 2).t(), torch.empty(2, 6)[:, ::2]):
            x = torch.arange(6.0).view(2, 3)
            grads, *_ = ps.accumulate(
                lambda w, m: (w * m).sum().expand(1),
                leaf,
                [x, 2 * x, 4 * x],
                weight_fn=lambda m: torch.ones(1),
                out=[place],
                ready=lambda index: None,
            )
            assert grads is place
            assert torch.equal(grads, 7 * x)


@pytest.mark.parametrize("fails", [False, True])
def test_autocast_keeps_nothing_of_ours(fails: bool) -> None:
    """Its casts of a microbatch's leaves go with the microbatch, in a long-lived autocast too."""
    casts: list[weakref.ref[Tensor]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.name() == "aten::_to_copy" and result.dtype == torch.bfloat16:
                casts.append(weakref.ref(result))
            return result

    def loss_fn(w: Tensor, m: Tensor) -> Tensor:
        losses = (m @ w).float().sum(1)
        if fails:
            raise ArithmeticError
        return losses

    x = [torch.ones(2, 3, dtype=torch.bfloat16)] * 2
    failing = pytest.raises(ArithmeticError) if fails else contextlib.nullcontext()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with Seen(), failing:
                ps.accumulate(loss_fn, torch.ones(3, 3), x, weight_fn=lambda m: torch.ones(2))
            assert casts
            assert all(cast() is None for cast in casts)
            casts.clear()


WAYS: list[dict[str, Any]] = [{}, {"grad_and_value": torch.func.grad_and_value}]


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
def test_nothing_of_a_closure_is_recorded_by_any_reverse_mode(how: dict[str, Any]) -> None:
    """On one rank and on several; the graph does not grow from step to step."""
    teacher = torch.nn.Parameter(torch.tensor([3.0]))
    sgd, w, group = ps.optim.sgd(0.5), torch.ones(1), [{"x": torch.ones(1)}, {"x": torch.ones(1)}]

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        losses = (w * m["x"] - teacher).square()
        return ps.LossTerms(losses, aux=losses.sum())

    axis = ps.testing.ThreadAxis(2)
    alone = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, **how)
    ranks = axis.map(ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, axis=axis, **how))
    one = alone(w, sgd.init(w), group)
    two = ranks([w] * 2, [sgd.init(w)] * 2, [group[:1], group[1:]])
    for new, _, metrics in (one, *two):
        assert new == 3
        assert not new.requires_grad
        assert not metrics.aux.requires_grad
    assert teacher.grad is None


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
@pytest.mark.parametrize("recorded", [True, False])
def test_params_are_not_written_to_in_any_way(how: dict[str, Any], recorded: bool) -> None:
    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            w.mul_(2)
        return w * m["x"]

    w = torch.ones(1, requires_grad=recorded)
    with pytest.raises(ValueError, match="loss_fn wrote to params in place"):
        ps.accumulate(loss_fn, w, [{"x": torch.ones(1)}], weight_fn=x_ones, **how)


class Encoding(UserDict[str, Tensor]):
    """A mapping that optree takes for a leaf, as a tokenizer's BatchEncoding is."""


def test_mappings_are_seen_into() -> None:
    """By derivatives, and by donation."""
    sgd, w, x = ps.optim.sgd(0.5), torch.ones(1), torch.tensor([2.0], requires_grad=True)
    step = ps.make_update_step(lambda w, m: w * m["x"].square(), sgd, weight_fn=x_ones)
    step(w, sgd.init(w), [Encoding(x=torch.ones(1)), Encoding(x=x)])[0].backward()
    assert x.grad == -0.5 * 2 * 2 / 2
    donating = ps.make_update_step(lambda w, m: w * m["x"], sgd, weight_fn=x_ones, donate=True)
    with pytest.raises(ValueError, match=r"but microbatches\[1\]\['x'\] shares its memory"):
        donating(w, sgd.init(w), [Encoding(x=torch.ones(1)), Encoding(x=w)])


def test_the_losses_dtype_does_not_depend_on_the_order() -> None:
    """Nor does their sum: float32 loses a one beside 2 ** 24, and float64 does not."""
    group = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0**24 + 1], dtype=torch.float64)}]
    w = torch.ones(1)
    evaluate = ps.make_eval_step(lambda w, m: w * m["x"], weight_fn=x_ones)
    for parts in (group, group[::-1]):
        _, loss, *_ = ps.accumulate(lambda w, m: w * m["x"], w, parts, weight_fn=x_ones)
        assert loss.dtype == torch.float64
        assert loss == 2**24 + 2
        assert evaluate(w, parts).loss == 2**23 + 1
    many = [{"x": torch.tensor([2.0**24])}, *[{"x": torch.tensor([1.0])}] * 1023]
    total = evaluate(w, many).loss
    assert total.dtype == torch.float32
    assert total == torch.tensor((2**24 + 1023) / 1024)


class Scale(torch.autograd.Function):
    """tanh(x w), as fused kernels are written: torch's own functions do not see its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x * w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        slope = grad * (1 - torch.tanh(x * w) ** 2)
        return slope * w, (slope * x).sum(0)


class Block(torch.nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return Scale.apply(x, self.w) if self.fused else torch.tanh(x * self.w)

        out: Tensor = checkpoint(body, x, use_reentrant=False)
        return out


def layers(block: Block, p: Any, x: Tensor) -> Tensor:
    for w in p["layers"]:
        x = torch.func.functional_call(block, {"w": w}, (x,))
    return x


def adapted(block: Block, p: Any, x: Tensor) -> Tensor:
    adapted_w = block.w + p["up"] @ p["down"]
    out: Tensor = torch.func.functional_call(block, {"w": adapted_w}, (x,))
    return out


def closed_over(block: Block, p: Any, x: Tensor) -> Tensor:
    out: Tensor = block(x * p["up"].sum())
    return out


@pytest.mark.parametrize("program", [layers, adapted, closed_over])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_with_a_modules_own_parameters(
    program: Any, fused: bool, frozen: bool
) -> None:
    """Refused, since nobody can tell whether the forward pass had them too; the way out is right."""
    block, weights = Block(fused).requires_grad_(not frozen), lambda m: torch.ones(2)
    generator = torch.Generator().manual_seed(0)
    params = {
        "layers": torch.rand(2, 3, generator=generator),
        "up": torch.rand(3, 2, generator=generator),
        "down": torch.rand(2, generator=generator),
    }
    group = [{"x": torch.ones(2, 3)}] * 2
    with pytest.raises(
        ValueError, match=r"own parameter, of shape \(3,\).*ps\.from_module\(module\)"
    ):
        ps.accumulate(
            lambda p, m: program(block, p, m["x"]).sum(1), params, group, weight_fn=weights
        )
    assert block.w.grad is None


def test_the_way_out_of_a_checkpoint_with_a_modules_own_parameters() -> None:
    block = torch.nn.Linear(3, 3)
    x, weights = torch.rand(2, 3), lambda m: torch.ones(2)
    params = {"weight": torch.rand(3, 3)}
    frozen = {"bias": block.bias.detach()}

    def called(p: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(block, {**frozen, **p}, (x,)).tanh()
        return out

    grads = [
        ps.accumulate(loss_fn, params, [{"x": x}] * 2, weight_fn=weights)[0]["weight"]
        for loss_fn in (
            lambda p, m: called(p, m["x"]).sum(1),
            lambda p, m: checkpoint(called, p, m["x"], use_reentrant=False).sum(1),
        )
    ]
    assert torch.equal(grads[0], grads[1])


def test_a_loss_that_marks_its_microbatch() -> None:
    """``requires_grad_`` on what it is given, to differentiate by it: the data stay as they were, step after step."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        m["x"].requires_grad_()
        (force,) = torch.autograd.grad((m["x"] * w).square().sum(), m["x"], create_graph=True)
        return force

    microbatch = {"x": torch.tensor([3.0])}
    for _ in range(2):
        grads, *_ = ps.accumulate(loss_fn, torch.ones(1), [microbatch], weight_fn=x_ones)
        assert grads == 2 * 2 * 3
        assert not microbatch["x"].requires_grad


def test_nothing_of_a_closure_is_recorded_under_vmap() -> None:
    teacher = torch.nn.Parameter(torch.tensor(3.0))
    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    axis = ps.VmapAxis(2)
    step = ps.make_update_step(
        lambda w, x: (w * x - teacher) ** 2, sgd, weight_fn=torch.ones_like, axis=axis
    )
    new, _, _ = axis.map(step, (None, None, 0), None)(w, sgd.init(w), [torch.ones(2, 1)])
    assert new == 3
    assert not new.requires_grad
    recorded = w.clone().requires_grad_()
    new, _, _ = axis.map(step, (None, None, 0), None)(recorded, sgd.init(w), [torch.ones(2, 1)])
    assert new.requires_grad

    def moved(target: Tensor) -> Tensor:
        by = ps.make_update_step(lambda w, x: (w * x - target) ** 2, sgd, weight_fn=torch.ones_like)
        return by(w, sgd.init(w), [torch.ones(1)])[0]

    assert torch.func.grad(moved)(torch.tensor(3.0)) == 1


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_loss_that_writes_to_its_mask(normalize: Any) -> None:
    """What was counted multiplies, whatever becomes of the microbatch."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        m["mask"][0] = 0
        return w * m["x"]

    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["mask"], normalize=normalize)
    new, _, metrics = step(w, sgd.init(w), [{"x": torch.ones(2), "mask": torch.ones(2)}])
    assert metrics.num_tokens == 2
    assert new == 0.5


def test_a_term_of_a_microbatch_without_tokens_may_be_anything() -> None:
    """A mean over its tokens, say."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        mean = (m["w"] * w * m["x"]).sum() / m["w"].sum()
        return ps.LossTerms(w * m["x"], microbatch=mean)

    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["w"])
    full = {"x": torch.ones(2), "w": torch.ones(2)}
    new, _, metrics = step(w, sgd.init(w), [full, {**full, "w": torch.zeros(2)}])
    assert new == 0
    assert metrics.num_microbatches == 1


def test_sparse_gradients_of_any_reverse_mode() -> None:
    grads, *_ = ps.accumulate(
        lambda p, m: torch.nn.functional.embedding(m["x"], p, sparse=True).sum(-1),
        torch.zeros(4, 2),
        [{"x": torch.tensor([1, 1])}, {"x": torch.tensor([3, 0])}],
        weight_fn=x_ones,
        grad_and_value=torch.func.grad_and_value,
    )
    assert grads.sum(1).tolist() == [2, 4, 0, 2]
