"""Optimizers: how they compose, and what they refuse. T8 compares them with torch."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import tree
from purestep.optim.base import guarded
from purestep.testing.bounds import gamma
from tests.torch_internals import TorchDispatchMode

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}
GRADS = {"w": torch.full((2, 2), 3.0), "b": torch.full((2,), -2.0)}
TRANSFORMS = {
    "clip": ps.optim.clip_by_global_norm(1.0),
    "momentum": ps.optim.momentum(0.5, nesterov=True),
    "adam": ps.optim.scale_by_adam(),
    "decay": ps.optim.add_decayed_weights(0.5),
}


def test_chain_of_transforms_is_a_transform() -> None:
    chained = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"])
    assert isinstance(chained, ps.optim.Transform)
    nested = ps.optim.chain(chained, ps.optim.sgd(0.1))
    assert isinstance(nested, ps.optim.Optimizer)
    flat = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"], ps.optim.sgd(0.1))
    results = [o.update(GRADS, o.init(PARAMS), PARAMS)[0] for o in (nested, flat)]
    assert torch.equal(results[0]["w"], results[1]["w"])


def test_chain_refuses() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ps.optim.chain()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"part 0 of 2 is an Optimizer.*put it last"):
        ps.optim.chain(ps.optim.sgd(0.1), ps.optim.sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="part 1 must be a Transform or an Optimizer, got float"):
        ps.optim.chain(TRANSFORMS["clip"], 0.1)  # type: ignore[type-var]


@pytest.mark.parametrize("name", TRANSFORMS)
@given(scale=st.sampled_from([0.25, 1.0, 8.0]))
def test_grad_scale_divides(name: str, scale: float) -> None:
    """``grad_scale`` is a division of the gradients, exactly so for a power of two."""
    transform = TRANSFORMS[name]
    state = transform.init(PARAMS)
    scaled = tree.map(lambda g: g * scale, GRADS)
    folded = transform.update(scaled, state, PARAMS, grad_scale=torch.tensor(scale))
    plain = transform.update(GRADS, state, PARAMS)
    assert all(map(torch.equal, tree.leaves_of(folded), tree.leaves_of(plain)))


def test_grad_scale_for_whom_it_is_unknown() -> None:
    """A transform of one's own with three arguments gets gradients that are divided already."""
    seen = []

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append(grads)
        return grads, state

    optimizer = ps.optim.chain(ps.optim.Transform(lambda params: (), update), ps.optim.sgd(0.1))
    step = ps.make_update_step(
        lambda p, m: p["w"].sum() * m, optimizer, weight_fn=torch.ones_like, normalize="grads"
    )
    step(PARAMS, optimizer.init(PARAMS), [torch.ones(4)])
    assert torch.equal(seen[0]["w"], torch.ones(2, 2))


@given(st.floats(0.1, 10))
def test_clipping(max_norm: float) -> None:
    clip = ps.optim.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(GRADS, (), PARAMS)
    norm = tree.global_norm(GRADS)
    assert tree.global_norm(clipped) <= min(max_norm, float(norm)) * (1 + 1e-6)
    if norm <= max_norm:
        assert torch.equal(clipped["w"], GRADS["w"])


def test_mask_as_a_tree_or_a_function() -> None:
    masks: list[Any] = [matrices, matrices(PARAMS)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        zero = tree.zeros_like(PARAMS)
        new, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    assert set(ps.optim.adamw(0.1, mask=True).init(PARAMS)) == {"decay"}
    for mask in ({"w": True}, 1, tree.map(lambda leaf: torch.tensor(True), PARAMS)):
        with pytest.raises(
            ValueError, match="the weight-decay mask must be a tree of bools like the params"
        ):
            ps.optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


def test_state_is_complete_and_detached() -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    algorithms = [
        ps.optim.from_torch(torch.optim.Adagrad, initial_accumulator_value=0.5),
        ps.optim.from_torch(torch.optim.ASGD),
    ]
    for optimizer in [*(make(0.1) for make in RECIPES.values()), *algorithms]:
        state = optimizer.init(params)
        _, after = optimizer.update(GRADS, state, PARAMS)
        assert tree.flatten(state)[1] == tree.flatten(after)[1]
        assert not any(leaf.requires_grad for leaf in tree.leaves_of(state))


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any) -> Any:
        calls.append(grads["w"])
        tree.map(lambda p, g: p.sub_(g), params, grads)
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_, takes=())
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    params = tree.map(torch.clone, PARAMS)
    assert optimizer.update_ is not None
    new, _ = optimizer.update_(tree.map(torch.clone, GRADS), optimizer.init(params), params)
    assert len(calls) == 1
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert torch.equal(new["w"], PARAMS["w"] - calls[0])


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
def test_what_comes_behind_momentum_leaves_its_trace_alone(behind: str) -> None:
    """It may write to the updates that it is given, and they are not the state's memory."""
    first = ps.optim.momentum(0.5)
    optimizer = ps.optim.chain(first, TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    assert optimizer.update_ is not None
    for _ in range(2):
        pure = optimizer.update(GRADS, pure[1], pure[0])
        given = tree.map(torch.clone, (GRADS, in_place[1], in_place[0]))
        in_place = optimizer.update_(*given)
    assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(pure)))
    assert torch.equal(pure[1][0].trace["w"], 1.5 * GRADS["w"])


def test_what_does_not_decay_is_not_touched() -> None:
    """Not even multiplied by zero."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), float("inf"))}
    decay = ps.optim.add_decayed_weights(0.5, matrices)
    for update in (decay.update, torch.vmap(decay.update)):
        given = (GRADS, decay.init(params), params)
        given = given if update is decay.update else tree.map(lambda leaf: leaf[None], given)
        updates, _ = update(*given)
        assert torch.equal(updates["b"].squeeze(0), GRADS["b"])
        assert torch.equal(updates["w"].squeeze(0), GRADS["w"] + 0.5)


@pytest.mark.parametrize("takes", [(), ("grad_scale",), ("applied",), ("grad_scale", "applied")])
def test_only_keywords_that_are_declared_are_passed(takes: tuple[str, ...]) -> None:
    """Others are done before: gradients are divided, and the scalar is read on the host."""
    passed: list[set[str]] = []

    def update(grads: Any, state: Any, params: Any, **how: Any) -> Any:
        passed.append({*how})
        scale = how.get("grad_scale")
        scale = 1.0 if scale is None else scale
        applied = how.get("applied")
        if applied is None or applied:
            params = tree.map(lambda p, g: p.sub_(g / scale), params, grads)
        return params, state

    optimizer = ps.optim.Optimizer(lambda _: (), update, update, takes=takes)
    chained = ps.optim.chain(ps.optim.chain(optimizer))
    assert chained.update_ is not None
    scale = torch.tensor(2.0)
    for applied in (True, False):
        grads, params = tree.map(torch.clone, (GRADS, PARAMS))
        params, _ = chained.update_(
            grads, (((),),), params, grad_scale=scale, applied=torch.tensor(applied)
        )
        expected = PARAMS["w"] - GRADS["w"] / 2 if applied else PARAMS["w"]
        assert torch.equal(params["w"], expected)
    wanted = {"applied"} & {*takes} | {"grad_scale"} & {*takes}
    assert all(keywords <= wanted for keywords in passed)
    assert len(passed) == (2 if "applied" in takes else 1)
    pure, _ = chained.update(GRADS, (((),),), tree.map(torch.clone, PARAMS), grad_scale=scale)
    assert torch.equal(pure["w"], PARAMS["w"] - GRADS["w"] / 2)
    assert passed[-1] == {"grad_scale"} & {*takes}


def test_sgd_refuses_nesterov_without_momentum() -> None:
    with pytest.raises(
        ValueError, match="nesterov=True looks ahead along the momentum, but momentum=0"
    ):
        ps.optim.sgd(0.1, nesterov=True)


def test_schedules_refuse() -> None:
    with pytest.raises(ValueError, match="transition_steps=0 must be positive"):
        ps.optim.linear_schedule(0.0, 1.0, 0)
    with pytest.raises(ValueError, match="decay_steps=-1 must be positive"):
        ps.optim.cosine_decay_schedule(1.0, -1)
    with pytest.raises(ValueError, match=r"decay_steps=5 is the whole length .* warmup_steps=5"):
        ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5)
    with pytest.raises(
        ValueError, match="2 schedules have 1 boundaries between them, but 2 were given"
    ):
        ps.optim.join_schedules([lambda s: s, lambda s: s], [1, 2])


def test_schedules_keep_their_precision() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100, 0.03)
    assert schedule(torch.tensor(5)) == pytest.approx(0.15, rel=1e-15)
    assert schedule(torch.tensor(10)) == pytest.approx(0.3, rel=1e-15)
    assert schedule(torch.tensor(1000)) == pytest.approx(0.03, rel=1e-15)


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    """Matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


RECIPES: dict[str, Any] = {
    "descend": ps.optim.descend,
    "momentum": lambda rate: ps.optim.sgd(
        rate, 0.9, nesterov=True, weight_decay=0.1, mask=matrices
    ),
    "clipped": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0), ps.optim.sgd(rate, 0.5)
    ),
    "adamw": ps.optim.adamw,
    "masked adamw": lambda rate: ps.optim.adamw(rate, 0.5, 0.9, weight_decay=0.1, mask=matrices),
    "lion": lambda rate: ps.optim.lion(rate, weight_decay=0.1, mask=matrices),
    "adam": lambda rate: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(rate)),
    "partition": lambda rate: ps.optim.partition(
        labels,
        {"matrix": ps.optim.adamw(rate), "rest": ps.optim.sgd(rate, 0.9, nesterov=True)},
    ),
    "master": lambda rate: ps.optim.master_weights(ps.optim.sgd(rate, 0.9)),
    "ema": lambda rate: ps.optim.ema(ps.optim.sgd(rate, 0.9), 0.9),
}
RATES = [1e-2, torch.tensor(1e-2), ps.optim.linear_schedule(3e-2, 1e-3, 3)]
SHAPES = [(), (7,), (64,), (33, 5), (128, 3), (1003,)]


VECTOR = 16
"""A multiple of the elements that one instruction takes."""
FUSED: dict[str, Any] = {
    "adamw": lambda rate: ps.optim.adamw(rate, weight_decay=0.0),
    "masked adamw": lambda rate: ps.optim.adamw(rate, 0.5, 0.9, weight_decay=0.0),
    "partition": lambda rate: ps.optim.adamw(rate, weight_decay=0.0),
}
"""Those with a fused kernel, as they are without weight decay."""


def rounding_of_adamw(optimizer: ps.optim.Optimizer, params: Any, history: Any) -> Any:
    """How far two float32 runs of AdamW can be apart in params, μ and ν, on these gradients; for each element.

    Let M and D be μ and the distance travelled if all gradients were positive, in float64. Each of T steps rounds μ
    four times, relative to M, and ν, which is positive, five times: γ(4T) M and γ(5T) ν. A step is rate · μ̂ / (√ν̂ + ε),
    with μ rounded 4T times, √ν half as often as ν, and a dozen roundings of its own: γ(9T + 12) of what is added to
    D. Params are rounded four times in each step, relative to |θ₀| + D at most; decay makes errors smaller. Both runs
    round.
    """
    steps, dtype = len(history), torch.float32
    state: Any = ([torch.zeros_like(leaf, dtype=torch.float64) for leaf in params],) * 2
    state = (state[0], optimizer.init(state[0]))
    for grads in history:
        state = optimizer.update([grad.abs() for grad in grads], state[1], state[0])
    travelled = [-leaf for leaf in state[0]]
    return (
        [
            gamma(2 * (9 * steps + 12), dtype) * far
            + gamma(2 * 4 * steps, dtype) * (leaf.abs().double() + far)
            for leaf, far in zip(params, travelled, strict=True)
        ],
        [gamma(2 * 4 * steps, dtype) * leaf for leaf in state[1].mu],
        [gamma(2 * 5 * steps, dtype) * leaf for leaf in state[1].nu],
    )


def of_adamw(state: Any) -> dict[str, ps.optim.AdamWState]:
    """The states of AdamW in it."""
    states = state if isinstance(state, dict) else {"all": state}
    return {key: one for key, one in states.items() if isinstance(one, ps.optim.AdamWState)}


def assert_tail_within(a: torch.Tensor, b: torch.Tensor, bound: torch.Tensor) -> None:
    """Equal to the bit in whole vectors, and within the bound in what is left."""
    whole = a.numel() // VECTOR * VECTOR
    assert torch.equal(a.flatten()[:whole], b.flatten()[:whole])
    assert ((a.double() - b.double()).abs() <= bound).all()


@pytest.mark.parametrize("of_grads", [torch.float32, torch.float16])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_plain_arithmetic_agree(
    name: str, dtype: torch.dtype, rate: Any, of_grads: torch.dtype
) -> None:
    """In place, out of place and under a transform: the same bits, at any length and whatever the rate is.

    Torch's fused kernel of AdamW rounds otherwise in what is left of whole vectors: there, within the bound.
    """
    optimizer = RECIPES[name](rate)
    assert optimizer.update_ is not None
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    state = in_place = (params, optimizer.init(params))
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    history = []
    for step in range(4):
        grads = [torch.randn(shape, generator=generator).to(of_grads) for shape in SHAPES]
        scale = torch.tensor(7.3, dtype=torch.float64) if step % 2 else None
        history.append([grad.double() / (1 if scale is None else scale) for grad in grads])

        def under_vmap(
            grads: Any, state: Any, params: Any, scale: torch.Tensor | None = scale
        ) -> Any:
            return optimizer.update(grads, state, params, grad_scale=scale)

        both = [torch.stack([grad, -grad]) for grad in grads]
        batched = torch.vmap(under_vmap)(both, batched[1], batched[0])
        given = tree.map(torch.clone, grads)
        new = optimizer.update(grads, state[1], state[0], grad_scale=scale)
        assert all(map(torch.equal, grads, given))
        own_params, own_state = tree.map(torch.clone, in_place)
        in_place = optimizer.update_(given, own_state, own_params, grad_scale=scale)
        state = new
    one = tree.map(lambda leaf: leaf[0], batched)
    assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(state)))
    if name not in FUSED or dtype != torch.float32:
        assert all(map(torch.equal, tree.leaves_of(one), tree.leaves_of(state)))
        return
    bounds = rounding_of_adamw(FUSED[name](rate), params, history)
    for place, bound in enumerate(bounds[0]):
        assert_tail_within(one[0][place], state[0][place], bound)
    for label, other in of_adamw(one[1]).items():
        mine = of_adamw(state[1])[label]
        assert other.step == mine.step
        for slot, bound in (("mu", bounds[1]), ("nu", bounds[2])):
            pairs = zip(getattr(other, slot), getattr(mine, slot), bound, strict=True)
            for theirs, ours, limit in pairs:
                if isinstance(ours, torch.Tensor):
                    assert_tail_within(theirs, ours, limit)


WAYS = ["update", "update_"]


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECIPES)
def test_a_count_of_any_dtype_is_the_number_that_it_is(
    name: str, dtype: torch.dtype, method: str
) -> None:
    """``grad_scale`` in int64, uint8 or bool divides to the bits of the same number in float64."""
    optimizer = RECIPES[name](0.1)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    grads = [100 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    kinds = [(37, torch.uint8), (100003, torch.int64), (100003, torch.int32), (1, torch.bool)]
    for number, kind in kinds:
        scales = torch.tensor(number, dtype=torch.float64), torch.tensor(number).to(kind)
        results = []
        for scale in scales:
            given = tree.map(torch.clone, (grads, optimizer.init(params), params))
            results.append(getattr(optimizer, method)(*given, grad_scale=scale))
        assert all(map(torch.equal, *map(tree.leaves_of, results)))


@pytest.mark.parametrize("scale", [None, torch.tensor(100003)])
@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_half_precision_gradient_is_what_it_is_in_float32(
    name: str, dtype: torch.dtype, half: torch.dtype, method: str, scale: torch.Tensor | None
) -> None:
    """To the bit: 300² and 1e-4 / 100003 are no numbers of float16, and 257 none of bfloat16."""
    optimizer = RECIPES[name](0.1)
    params = [torch.ones(2, 2, dtype=dtype), torch.ones(3, dtype=dtype)]
    grads = [torch.tensor([[300.0, -3e4], [1e-4, 0.0]]), torch.tensor([1e-4, 257.0, -6e-8])]
    results = []
    for kind in (half, torch.float32):
        state = (params, optimizer.init(params))
        for _ in range(2):
            own = [grad.to(half).to(kind) for grad in grads]
            ours, opt_state = tree.map(torch.clone, state)
            state = getattr(optimizer, method)(own, opt_state, ours, grad_scale=scale)
        results.append(state)
    assert all(map(torch.equal, *map(tree.leaves_of, results)))


def test_a_part_without_grad_scale_gets_what_its_own_dtype_can_hold() -> None:
    """A count of 100003 is infinite in float16, and 257 is 256 in bfloat16: the quotients are neither."""
    own = ps.optim.Transform(lambda params: (), lambda grads, state, params: (grads, state))
    chained = ps.optim.chain(own)
    for kind, number, count in ((torch.float16, 3e4, 100003), (torch.bfloat16, 1.0, 257)):
        grad = torch.full((1,), number, dtype=kind)
        divided = torch.vmap(lambda g, n: chained.update(g, ((),), g, grad_scale=n)[0])(
            grad[None], torch.tensor([count])
        )
        assert torch.equal(divided[0], (grad.double() / count).to(kind))


def test_update_keeps_its_hands_off() -> None:
    """``update`` leaves all that it is given as it is, where kernels run too."""
    for make in RECIPES.values():
        optimizer = make(0.1)
        given = (GRADS, optimizer.init(PARAMS), PARAMS)
        before = tree.map(torch.clone, given)
        optimizer.update(*given, grad_scale=torch.tensor(3.0))
        assert all(map(torch.equal, tree.leaves_of(before), tree.leaves_of(given)))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel for all leaves that decay alike, and of little else."""
    params = [torch.ones(16) for _ in range(50)]
    optimizer = ps.optim.adamw(0.1)
    opt_state = optimizer.init(params)
    assert optimizer.update_ is not None
    with Calls() as calls:
        optimizer.update_(params, opt_state, tree.map(torch.clone, params))
    assert calls.counts.pop("_fused_adamw_") == 1
    calls.counts.pop("clone")
    views = {"view", "slice", "alias", "detach"}
    assert sum(count for name, count in calls.counts.items() if name not in views) < 10


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (ps.optim.adamw, {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}),
    "scale_by_adam": (ps.optim.scale_by_adam, {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "sgd": (ps.optim.sgd, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
    "lion": (ps.optim.lion, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "momentum": (ps.optim.momentum, {"nesterov": False}),
}


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_the_papers(name: str) -> None:
    """Adam's [Kingma and Ba, 2015], AdamW's as in torch, Lion's [Chen et al., 2023]."""
    make, wanted = PAPERS[name]
    own = inspect.signature(make).parameters
    defaults = {key: p.default for key, p in own.items() if p.default is not p.empty}
    defaults.pop("mask", None)
    assert defaults == wanted


@pytest.mark.parametrize(
    ("optimizer", "namesake"),
    [
        (ps.optim.adamw(0.1), torch.optim.AdamW),
        (ps.optim.sgd(0.1), torch.optim.SGD),
        (ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.1)), torch.optim.Adam),
    ],
)
def test_defaults_are_torchs_in_effect(
    optimizer: ps.optim.Optimizer, namesake: type[torch.optim.Optimizer]
) -> None:
    """On gradients of the size of eps and far from it, in float64: twelve roundings in each of five steps."""
    params = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    grad = torch.tensor([1e-8, -3e-9, 1.0, 0.0], dtype=torch.float64)
    theirs = params.clone().requires_grad_()
    make: Any = namesake
    usual = make([theirs], lr=0.1)
    state = optimizer.init(params)
    for number in range(5):
        theirs.grad = grad * (1 + number)
        usual.step()
        params, state = optimizer.update(grad * (1 + number), state, params)
    bound = gamma(2 * 5 * 12, torch.float64) * (params.abs().max() + 5 * 0.1)
    assert (params - theirs.detach()).abs().max() <= bound


def test_lions_defaults_in_effect() -> None:
    """After a gradient of 1, μ is 0.01, and sign(0.9 μ + 0.1 g) turns at g = −0.09."""
    optimizer = ps.optim.lion(1.0)
    params = torch.zeros(2, dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    params, state = optimizer.update(ones, optimizer.init(params), params)
    params, _ = optimizer.update(torch.tensor([-0.089, -0.091]).double(), state, params)
    assert params.tolist() == [-2.0, 0.0]


def test_lion_passes_on_what_is_not_finite() -> None:
    """torch's sign of NaN is 0, which would be seen by nobody."""
    optimizer = ps.optim.lion(0.1)
    params = torch.ones(3)
    grad = torch.tensor([float("nan"), 0.0, float("inf")])
    moved, _ = optimizer.update(grad, optimizer.init(params), params)
    assert moved.isnan().tolist() == [True, False, True]


HELD_BACK = {
    **RECIPES,
    "own parts": lambda rate: ps.optim.chain(
        ps.optim.Transform(
            lambda params: tree.zeros_like(params),
            lambda grads, state, params: (
                tree.map(torch.add, grads, state),
                tree.map(torch.add, state, grads),
            ),
        ),
        ps.optim.sgd(rate, 0.9, weight_decay=0.1),
    ),
    "own optimizer": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.Optimizer(
            lambda params: (),
            lambda grads, state, params: (
                tree.map(lambda p, g: p - rate * g, params, grads),
                state,
            ),
        ),
    ),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("name", HELD_BACK)
def test_derivatives_of_an_update_that_is_held_back(name: str, bad: float) -> None:
    """``update_`` with ``applied=False`` is the identity, and so are its derivatives: by params, rate and gradients."""
    bads = tree.map(lambda leaf: leaf * bad, GRADS)
    ones = tree.map(torch.ones_like, PARAMS)

    def held_back(rate: Any, grads: Any, params: Any) -> Any:
        optimizer = HELD_BACK[name](rate)
        update_ = guarded(optimizer)
        state = optimizer.init(PARAMS)
        return update_(grads, state, params, applied=torch.tensor(False), grad_scale=None)[0]

    def total(*point: Any) -> torch.Tensor:
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(held_back(*point))]).sum()

    point = (torch.tensor(0.1), bads, PARAMS)
    slopes = torch.func.grad(total, argnums=(0, 1, 2))(*point)
    own = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
    recorded = torch.autograd.grad(total(*own), tree.leaves_of(own), materialize_grads=True)
    tangents = torch.func.jvp(held_back, point, (torch.tensor(1.0), ones, ones))[1]
    expected = tree.leaves_of((torch.tensor(0.0), tree.map(torch.zeros_like, GRADS), ones))
    assert all(map(torch.equal, tree.leaves_of(slopes), expected))
    assert all(map(torch.equal, recorded, expected))
    assert all(map(torch.equal, tree.leaves_of(tangents), tree.leaves_of(ones)))


OTHERS: dict[str, Any] = {
    "another name": {"w": torch.ones(2, 2), "c": torch.ones(2)},
    "one more": {**PARAMS, "z": torch.ones(3)},
    "one less": {"w": torch.ones(2, 2)},
    "what broadcasts": {"w": torch.ones(1, 2), "b": torch.ones(2)},
    "larger": {"w": torch.ones(50, 40), "b": torch.ones(40)},
    "integers": tree.map(lambda leaf: leaf.to(torch.int64), PARAMS),
    "float8": tree.map(lambda leaf: leaf.to(torch.float8_e4m3fn), PARAMS),
}
STATEFUL: dict[str, ps.optim.Optimizer] = {
    **{name: RECIPES[name](0.1) for name in RECIPES if name not in ("descend", "clipped")},
    "clipped adamw": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1)),
    "masters": ps.optim.master_weights(ps.optim.adamw(0.1)),
    "torch": ps.optim.from_torch(torch.optim.Adam),
    "torch, fused": ps.optim.from_torch(torch.optim.AdamW, fused=True),
    "torch, foreach": ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "of one's own": ps.optim.Optimizer(
        lambda params: {"sum": tree.zeros_like(params)},
        lambda grads, state, params: (
            tree.map(torch.sub, params, grads),
            {"sum": tree.map(torch.add, state["sum"], grads)},
        ),
    ),
}


def state_like(optimizer: ps.optim.Optimizer, other: str) -> Any:
    """The state of other params, after a step of theirs; or the right one in a dtype that is none for sums."""
    if other not in ("integers", "float8"):
        params = OTHERS[other]
        return optimizer.update(params, optimizer.init(params), params)[1]
    dtype = OTHERS[other]["w"].dtype
    return tree.map(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, optimizer.init(PARAMS)
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_params_is_refused(name: str, other: str, donate: bool) -> None:
    """Both structures, and the first difference by its path in the whole state; what was given is as it was."""
    optimizer = STATEFUL[name]
    step = ps.make_update_step(
        lambda p, m: (m @ p["w"] + p["b"]).sum(1),
        optimizer,
        weight_fn=lambda m: torch.ones(len(m)),
        donate=donate,
    )
    params, state = tree.map(torch.clone, PARAMS), state_like(optimizer, other)
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of") as caught:
        step(params, state, [torch.ones(3, 2)])
    message = str(caught.value)
    for structure in (tree.flatten(state)[1], tree.flatten(optimizer.init(PARAMS))[1]):
        assert tree.describe(structure) in message
    where = {*tree.paths(state, "opt_state"), *tree.paths(optimizer.init(PARAMS), "opt_state")}
    first = message.split("was expected; ")[1].split(" ")[0]
    assert first in where
    assert donate or all(map(torch.equal, tree.leaves_of(params), tree.leaves_of(PARAMS)))


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "of one's own"])
def test_a_state_of_other_params_is_refused_by_update(name: str, other: str, method: str) -> None:
    """Without the step, too."""
    optimizer = STATEFUL[name]
    given = tree.map(torch.clone, (GRADS, state_like(optimizer, other), PARAMS))
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of these"):
        getattr(optimizer, method)(*given)


def test_gradients_of_other_params_are_refused() -> None:
    for name in ("momentum", "adamw", "lion", "adam", "master"):
        optimizer = RECIPES[name](0.1)
        for grads in ({"w": GRADS["w"]}, {**GRADS, "b": torch.ones(1)}):
            with pytest.raises(ValueError, match=r"grads are not like params: grads\['b'\] is"):
                optimizer.update(grads, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "make",
    [
        ps.optim.sgd,
        ps.optim.adamw,
        ps.optim.lion,
        ps.optim.descend,
        lambda rate: ps.optim.from_torch(torch.optim.SGD, lr=rate),
    ],
)
def test_a_rate_that_is_none(make: Any) -> None:
    """torch's schedulers write into torch's optimizers; a schedule is a function."""
    usual = torch.optim.SGD([torch.ones(1)], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.StepLR(usual, 3),
        schedulers.ReduceLROnPlateau(usual),
        schedulers.CosineAnnealingLR,
    ):
        with pytest.raises(TypeError, match=r"scheduler of torch.*function of the step: ps\.optim"):
            make(scheduler)
    for rate in ("0.1", dict, [0.1]):
        with pytest.raises(TypeError, match="must be a number, a scalar tensor or a schedule"):
            make(rate)


def test_an_update_that_was_replaced_is_not_run() -> None:
    """Neither in place, nor of lists of leaves."""
    params = {"w": torch.ones(2)}

    def half(grads: Any, state: Any, params: Any) -> Any:
        return native.update(tree.map(lambda grad: grad / 2, grads), state, params)

    native = ps.optim.sgd(1.0)
    halved = native._replace(update=half, update_=None, takes=())
    group = [{"x": torch.ones(1)}]
    for donate in (False, True):
        step = ps.make_update_step(
            lambda p, m: p["w"].sum() * m["x"], halved, weight_fn=lambda m: m["x"], donate=donate
        )
        own = tree.map(torch.clone, params)
        assert step(own, halved.init(own), group)[0]["w"].tolist() == [0.5, 0.5]
