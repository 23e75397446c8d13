"""Clipping per example against arithmetic by hand, and noise that belongs to the group, whatever the cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing.bounds import gamma

Group = list[dict[str, Tensor]]
NAN = float("nan")
SGD = ps.optim.sgd(1.0)


def linear(params: dict[str, Tensor], m: dict[str, Tensor]) -> Tensor:
    """Losses whose gradients are the data: that of a token is (x, c)."""
    return m["x"] @ params["w"] + m["c"] * params["b"]


def weights(m: dict[str, Tensor]) -> Tensor:
    return m["weight"]


def zeros(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.zeros(2, dtype=dtype), "b": torch.zeros((), dtype=dtype)}


def data(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Four rows of two tokens. Their weighted gradients are (3, 4, 12), (0, 3, 0), nothing, and (48, 64, 192)."""
    return {
        "x": torch.tensor(
            [[[1, 2], [2, 2]], [[0, 1], [9, 9]], [[7, 7], [7, 7]], [[48, 64], [5, 5]]], dtype=dtype
        ),
        "c": torch.tensor([[8, 4], [0, 9], [7, 7], [192, 5]], dtype=dtype),
        "weight": torch.tensor([[1, 1], [3, 0], [0, 0], [1, 0]]),
    }


CLIPPED = {"w": [1.5 + 0 + 1.5, 2 + 3 + 2], "b": 6 + 0 + 6}
"""The sum of these rows' gradients, of lengths 13, 3, 0 and 208, at a clip of 6.5."""
TOKENS = 6


def pieces(batch: dict[str, Tensor], *rows: list[int]) -> Group:
    return [{name: leaf[each] for name, leaf in batch.items()} for each in rows]


def make_step(axis: Any = ps.LocalAxis(), **how: Any) -> Any:
    compile = how.pop("compile", False)
    return ps.make_update_step(
        linear,
        SGD,
        weight_fn=weights,
        axis=axis,
        normalize="grads",
        compile=compile,
        grad_and_value=ps.per_example(**how),
    )


def stepped(params: Any, group: Group, **how: Any) -> Any:
    return make_step(**how)(params, SGD.init(params), group)[0]


def on_threads(params: Any, groups: list[Group], **how: Any) -> Any:
    """Threads, each with a generator of its own, from a seed."""
    axis = ps.testing.ThreadAxis(len(groups))
    seed = how.pop("seed", None)

    def run(group: Group) -> Any:
        own = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        return stepped(params, group, axis=axis, **how, **own)

    results = axis.map(run)(groups)
    assert all(
        tree.map(torch.equal, result, results[0]) == tree.map(lambda _: True, result)
        for result in results
    )
    return results[0]


def on_vmap(params: Any, batch: dict[str, Tensor], **how: Any) -> Any:
    axis = ps.VmapAxis(2)
    halves = {name: leaf.unflatten(0, (2, -1)) for name, leaf in batch.items()}
    run = axis.map(
        lambda params, m: stepped(params, [m], axis=axis, **how),
        in_dims=(None, 0),
        out_dims=None,
        randomness="same",
    )
    return run(params, halves)


CUTS: dict[str, Callable[..., Any]] = {
    "one": lambda params, batch, **how: stepped(params, [batch], **how),
    "three": lambda params, batch, **how: stepped(params, pieces(batch, [2, 3], [0], [1]), **how),
    "rows of none": lambda params, batch, **how: stepped(
        params, pieces(batch, [], [0, 1, 2, 3], []), **how
    ),
    "one by one": lambda params, batch, **how: stepped(params, [batch], chunk_size=1, **how),
    "by threes": lambda params, batch, **how: stepped(params, [batch], chunk_size=3, **how),
    "threads": lambda params, batch, **how: on_threads(
        params, [pieces(batch, [0, 3], [1]), [], pieces(batch, [2])], **how
    ),
    "vmap": on_vmap,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
def test_clips_by_hand(cut: str, dtype: torch.dtype) -> None:
    """Each row's gradient over the whole tree; to the bit, since everything is a small dyadic number."""
    sums, loss, counted, _ = ps.accumulate(
        linear,
        zeros(dtype),
        [data(dtype)],
        weight_fn=weights,
        grad_and_value=ps.per_example(clip=6.5),
    )
    assert {name: grad.tolist() for name, grad in sums.items()} == CLIPPED
    assert (float(loss), int(counted.num_tokens), int(counted.num_microbatches)) == (0, TOKENS, 1)
    wide = tree.accumulation_dtype(dtype)
    grads = {name: torch.tensor(value, dtype=wide) for name, value in CLIPPED.items()}
    state, tokens = SGD.init(zeros(dtype)), torch.tensor(TOKENS)
    expected, _ = SGD.update(grads, state, zeros(dtype), grad_scale=tokens)
    new = CUTS[cut](zeros(dtype), data(dtype), clip=6.5)
    assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected)))


def test_gradients_whose_squares_are_infinite() -> None:
    """In float32 those of 1e30 are; the row is as long as ``clip`` all the same, and the other one stays."""
    params = {"w": torch.zeros(2), "b": torch.zeros(())}
    rows = {
        "x": torch.tensor([[[3e30, 4e30]], [[0.0, 1.0]]]),
        "c": torch.zeros(2, 1),
        "weight": torch.ones(2, 1),
    }
    new = stepped(params, [rows], clip=5.0)
    expected = torch.tensor([-1.5, -2.5])  # of (3, 4) and (0, 1), over two tokens
    torch.testing.assert_close(new["w"], expected, rtol=gamma(8, torch.float32), atol=0)


def test_compiled() -> None:
    """As one graph, without a warning."""
    group, how = pieces(data(), [2, 3], [0], [1]), {"clip": 6.5, "chunk_size": 1}
    compiled, eager = (stepped(zeros(), group, compile=each, **how) for each in (True, False))
    assert all(map(torch.equal, tree.leaves_of(compiled), tree.leaves_of(eager)))


@pytest.mark.parametrize("cut", CUTS)
def test_rows_without_weight_add_exact_zeros(cut: str) -> None:
    """Whatever is in them."""
    batch = data()
    for bad in (NAN, float("inf")):
        batch["x"][2], batch["c"][2] = bad, bad
        new, same = (CUTS[how](zeros(), batch, clip=6.5) for how in (cut, "one"))
        assert all(leaf.isfinite().all() for leaf in new.values())
        assert torch.equal(new["w"], same["w"])
        assert torch.equal(same["w"], CUTS["one"](zeros(), data(), clip=6.5)["w"])


def test_rows_whose_loss_brings_no_weight() -> None:
    batch = data()
    batch["x"][2] = NAN
    sums = ps.accumulate(
        lambda p, m: ps.LossTerms(linear(p, m), weights=m["weight"]),
        zeros(),
        [batch],
        weight_fn=None,
        grad_and_value=ps.per_example(clip=6.5),
    )
    assert {name: grad.tolist() for name, grad in sums.grads.items()} == CLIPPED
    assert sums.counted.num_tokens == TOKENS


def test_a_derivative_through_the_clip() -> None:
    """Of ½ (x·θ)², the gradient is (x·θ) x; clipped, its direction alone, which does not change with θ."""
    x = torch.tensor([[1.0, 1.0], [4.0, 3.0], [0.0, 0.0], [0.5, -1.0]]).double()
    theta = torch.tensor([1.0, 2.0]).double()
    step = ps.make_update_step(
        lambda w, m: (m @ w).square() / 2,
        SGD,
        weight_fn=lambda m: torch.ones(len(m)),
        normalize="grads",
        grad_and_value=ps.per_example(clip=5.0, chunk_size=2),
    )
    slope = torch.func.jacrev(lambda w: step(w, SGD.init(w), [x])[0])(theta)
    expected = torch.eye(2).double() - (x[0].outer(x[0]) + x[3].outer(x[3])) / 4
    # Of sums whose terms are below 4 in all, after ten roundings at most.
    assert (slope - expected).abs().max() <= gamma(10, torch.float64) * 4


def test_what_is_not_finite_stays_so() -> None:
    """A row that counts is not clipped into a number."""
    batch = data()
    batch["x"][0, 0, 0] = NAN
    assert all(leaf.isnan().all() for leaf in stepped(zeros(), [batch], clip=6.5).values())
    step = ps.make_update_step(
        linear,
        SGD,
        weight_fn=weights,
        normalize="grads",
        on_nonfinite="skip",
        grad_and_value=ps.per_example(clip=6.5),
    )
    new, _, metrics = step(zeros(), SGD.init(zeros()), [batch])
    assert not metrics.applied
    assert torch.equal(new["w"], zeros()["w"])


def test_values_and_aux_are_those_of_the_microbatch() -> None:
    """Sums over its rows; each row is given what has no dimension."""

    def loss_fn(params: Any, m: Any) -> ps.LossTerms:
        losses = linear(params, m)
        scaled = (m["temperature"] * losses).sum()
        return ps.LossTerms(losses, aux={"positive": (losses > 0).sum(), "scaled": scaled})

    params = {"w": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor(3.0).double()}
    group = [
        {**each, "temperature": torch.tensor(0.5)} for each in pieces(data(), [0, 1], [2], [3])
    ]
    modes: list[Any] = [
        ps.grad_and_value,
        *(ps.per_example(clip=1.0, chunk_size=n) for n in (None, 1)),
    ]
    plain, *others = (
        ps.make_update_step(
            loss_fn, SGD, weight_fn=weights, normalize="grads", grad_and_value=mode
        )(params, SGD.init(params), group)[2]
        for mode in modes
    )
    for metrics in others:
        for field in ("loss", "num_tokens", "num_microbatches"):
            assert torch.equal(getattr(metrics, field), getattr(plain, field))
        assert metrics.aux == plain.aux


ELEMENTS = 200_000


def nothing(elements: int = ELEMENTS) -> dict[str, Tensor]:
    return {
        "w": torch.zeros(elements, 2, dtype=torch.float64),
        "b": torch.zeros((), dtype=torch.float64),
    }


def quiet(params: dict[str, Tensor], m: dict[str, Tensor]) -> Tensor:
    """A loss whose gradients are zeros, so that a step shows the noise alone."""
    return m["c"] * 0 * (params["b"] + params["w"].sum())


def noise_of(group: Group, **how: Any) -> Tensor:
    step = ps.make_update_step(
        quiet, SGD, weight_fn=weights, normalize="grads", grad_and_value=ps.per_example(**how)
    )
    params = nothing()
    new, _, metrics = step(params, SGD.init(params), group)
    return -new["w"].flatten() * metrics.num_tokens


@pytest.mark.parametrize("rows", [([0, 1, 2, 3],), ([0], [1, 2], [3]), ([0], [1], [2], [3])])
def test_the_noise_is_that_of_one_draw(rows: tuple[list[int], ...]) -> None:
    """Mean 0 and deviation noise · clip, whatever the number of microbatches: within five standard errors."""
    noise = noise_of(
        pieces(data(), *rows), clip=2.0, noise=1.5, generator=torch.Generator().manual_seed(7)
    )
    n, deviation = noise.numel(), 3.0
    assert abs(float(noise.mean())) < 5 * deviation / math.sqrt(n)
    # The variance of n squares of deviation σ is 2 σ⁴ / n.
    assert abs(float(noise.square().mean()) - deviation**2) < 5 * deviation**2 * math.sqrt(2 / n)


@pytest.mark.parametrize("cut", CUTS)
def test_the_update_with_noise_does_not_depend_on_the_cut(cut: str) -> None:
    """From generators in one state, the noise is the same, to the bit; and the sums are exact."""

    def update(cut: str) -> Any:
        how = {"seed": 3} if cut == "threads" else {"generator": torch.Generator().manual_seed(3)}
        return CUTS[cut](zeros(), data(), clip=6.5, noise=0.25, **how)

    one, other = update("one"), update(cut)
    assert torch.equal(one["w"], other["w"])
    assert torch.equal(one["b"], other["b"])
    assert not torch.equal(one["w"], CUTS["one"](zeros(), data(), clip=6.5)["w"])


def test_threads_that_share_a_generator_draw_the_same() -> None:
    axis, shared = ps.testing.ThreadAxis(3), torch.Generator().manual_seed(3)
    step = make_step(axis, clip=6.5, noise=0.25, generator=shared)
    groups = [pieces(data(), [0, 3]), [], pieces(data(), [1], [2])]

    def run(group: Group) -> Any:
        params, state = zeros(), SGD.init(zeros())
        for _ in range(3):
            params, state, _ = step(params, state, group)
        return params

    results = axis.map(run)(groups)
    alone = torch.Generator().manual_seed(3)
    step = make_step(clip=6.5, noise=0.25, generator=alone)
    params, state = zeros(), SGD.init(zeros())
    for _ in range(3):
        params, state, _ = step(params, state, [data()])
    assert all(torch.equal(result["w"], params["w"]) for result in results)
    assert torch.equal(shared.get_state(), alone.get_state())


def test_ranks_that_would_draw_different_noise_are_told() -> None:
    axis = ps.testing.ThreadAxis(2)

    def run(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return stepped(zeros(), [data()], axis=axis, clip=1.0, noise=1.0, generator=generator)

    with pytest.raises(ValueError, match=r"disagree on settings.*a generator in the state"):
        axis.map(run)([0, 1])


def test_vmap_is_to_draw_the_same() -> None:
    how = {"clip": 1.0, "noise": 1.0, "generator": torch.Generator().manual_seed(0)}
    axis = ps.VmapAxis(2)
    run = axis.map(lambda m: stepped(zeros(), [m], axis=axis, **how), in_dims=0, out_dims=None)
    with pytest.raises(RuntimeError, match="use the 'same'"):
        run({name: leaf.unflatten(0, (2, 2)) for name, leaf in data().items()})


def test_a_run_goes_on_from_the_generators_state() -> None:
    """And the global generator is left alone."""
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(5)
    step = make_step(clip=1.0, noise=1.0, generator=generator)
    state = zeros(), SGD.init(zeros())
    *state, _ = step(*state, [data()])
    saved, drawn = tree.map(torch.clone, tuple(state)), generator.get_state()
    *expected, _ = step(*state, [data()])
    generator.set_state(drawn)
    *again, _ = step(*saved, [data()])
    assert torch.equal(expected[0]["w"], again[0]["w"])
    assert not torch.equal(expected[0]["w"] - state[0]["w"], state[0]["w"])
    assert torch.equal(before, torch.get_rng_state())


def test_no_tokens_are_the_identity_with_noise_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for group in ([], pieces(data(), [2])):
        new = stepped(zeros(), group, clip=1.0, noise=1.0, generator=generator)
        assert torch.equal(new["w"], zeros()["w"])


def test_the_norm_that_is_told_is_that_of_the_noisy_sum() -> None:
    step = make_step(clip=6.5, noise=4.0, generator=torch.Generator().manual_seed(0))
    new, _, metrics = step(zeros(), SGD.init(zeros()), [data()])
    assert torch.allclose(metrics.grad_norm, tree.global_norm(new))


def test_a_module_with_dropout() -> None:
    """Rows draw for themselves; an embedding, attention and norms go through."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    params, apply = ps.from_module(torch.nn.Sequential(torch.nn.Embedding(5, 8), layer))
    group = [{"tokens": torch.randint(5, (3, 4)), "labels": torch.randint(8, (3, 4))}]
    sums = ps.accumulate(
        lambda p, m: ps.losses.cross_entropy(apply(p, m["tokens"]), m["labels"]),
        params,
        group,
        grad_and_value=ps.per_example(clip=1e-3, chunk_size=2),
    )
    assert 0 < tree.global_norm(sums.grads) <= 3e-3


@pytest.mark.parametrize("noisy", [False, True])
def test_refuses_gradients_that_are_divided(noisy: bool) -> None:
    how = {"noise": 1.0, "generator": torch.Generator()} if noisy else {}
    mode = ps.per_example(clip=1.0, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'pass normalize="grads" to a step'):
        ps.make_update_step(linear, SGD, grad_and_value=mode)
    with pytest.raises(ValueError, match="no total= to accumulate"):
        ps.accumulate(
            linear,
            zeros(),
            [data()],
            weight_fn=weights,
            total=ps.count([data()], weights),
            grad_and_value=mode,
        )


def test_accumulate_leaves_the_noise_to_whoever_sums() -> None:
    mode = ps.per_example(clip=6.5, noise=1.0, generator=torch.Generator().manual_seed(1))
    how: Any = {"weight_fn": weights}
    with pytest.raises(ValueError, match=r"_, of_sum = grad_and_value\.begin\(\)"):
        ps.accumulate(linear, zeros(), [data()], grad_and_value=mode, **how)
    sums = ps.accumulate(linear, zeros(), [data()], grad_and_value=mode.grad_and_value, **how)
    assert mode.begin is not None
    _, of_sum = mode.begin()
    assert not torch.equal(of_sum([sums.grads["w"]])[0], sums.grads["w"])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"clip": 0.0}, "clip=0.0 must be a norm above 0"),
        ({"clip": NAN}, "clip=nan must be"),
        ({"clip": 1.0, "noise": -1.0}, "noise=-1.0 must be a number of clips"),
        ({"clip": 1.0, "noise": 1.0}, "noise=1.0 needs a generator, the same on every rank"),
        (
            {"clip": float("inf"), "noise": 1.0, "generator": torch.Generator()},
            "no finite deviation",
        ),
        ({"clip": 1.0, "chunk_size": 0}, "chunk_size=0 must be a number of rows"),
    ],
)
def test_refuses_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.per_example(**how)


def test_refuses_what_has_no_rows() -> None:
    clip = ps.per_example(clip=1.0)
    with pytest.raises(ValueError, match=r"need one common first dimension.*\['b'\] \(3,\)"):
        clip(lambda w, m: w)(torch.tensor(1.0), {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="argnums=1 must be 0"):
        clip(lambda w, m: w, argnums=1)


def test_without_a_step() -> None:
    """A function of params and a microbatch, as any reverse mode takes."""
    grads, value = ps.per_example(clip=2.5)(lambda w, x: (x @ w).sum())(
        torch.zeros(2), torch.tensor([[3.0, 4.0], [0.5, 0.0]])
    )
    assert grads.tolist() == [2.0, 2.0]
    assert value == 0
