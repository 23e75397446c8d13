"""Every decision of the design that a user can run into, and the words they see."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

SGD = ps.optim.sgd(0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)


def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
    """(w x − y)², for each token."""
    return (params["w"] * microbatch["x"] - microbatch["y"]).square()


def weight_fn(microbatch: dict[str, Tensor]) -> Tensor:
    """Every token the same."""
    return torch.ones_like(microbatch["x"])


PARAMS = {"w": torch.tensor(1.0)}
MICROBATCH = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0, 5.0])}


def step_with(
    loss: Any = loss_fn, optimizer: Any = SGD, group: Any = (MICROBATCH,), **settings: Any
) -> Any:
    """One update with these settings."""
    step = ps.make_update_step(loss, optimizer, **{"weight_fn": weight_fn, **settings})
    return step(PARAMS, SGD.init(PARAMS), group)


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_a_reduced_loss(reduce: Any) -> None:
    with pytest.raises(
        ValueError, match=r'shape \(\) against .*\(2,\).*one loss per token.*mean.*reduction="none"'
    ):
        step_with(lambda p, m: reduce(loss_fn(p, m)))


def test_losses_of_another_shape_are_not_broadcast() -> None:
    with pytest.raises(
        ValueError, match=r"\(2, 1\) against weights of shape \(2,\).*never broadcast"
    ):
        step_with(lambda p, m: loss_fn(p, m)[:, None])
    with pytest.raises(ValueError, match=r"\(2,\) against weights of shape \(1,\)"):
        step_with(weight_fn=lambda m: torch.ones(1))


@pytest.mark.parametrize("output", [3.0, None, torch.tensor([1, 2])])
def test_a_loss_that_is_no_loss(output: Any) -> None:
    with pytest.raises(TypeError, match="must return a floating point tensor, one loss per token"):
        step_with(lambda p, m: output)


def test_bad_weights() -> None:
    with pytest.raises(ValueError, match="weights must be finite and not negative, but one is -1"):
        step_with(weight_fn=lambda m: -weight_fn(m))


Optax = namedtuple("Optax", "init update")


class Batch(NamedTuple):
    """A microbatch that is a tuple too."""

    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("microbatches", "found"),
    [
        (MICROBATCH, "dict"),
        (torch.ones(2, 3), "Tensor"),
        (Batch(torch.ones(2), torch.ones(2)), "Batch"),
        (iter([MICROBATCH]), "list_iterator"),
    ],
)
def test_what_is_no_sequence_of_microbatches(microbatches: Any, found: str) -> None:
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    with pytest.raises(TypeError, match=rf"got {found}: cut a stacked batch with ps\.split"):
        step(PARAMS, SGD.init(PARAMS), microbatches)
    with pytest.raises(TypeError, match=rf"got {found}"):
        ps.make_eval_step(loss_fn, weight_fn=weight_fn)(PARAMS, microbatches)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.tensor(True), "torch.bool"),
        (torch.ones(1, dtype=torch.complex64), "torch.complex64"),
        (1.0, "float"),
    ],
)
def test_params_that_have_no_gradient(leaf: Any, found: str) -> None:
    params = {"layers": [{"w": torch.ones(())}, {"w": leaf}]}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    with pytest.raises(
        TypeError, match=rf"params\['layers'\]\[1\]\['w'\] is {found}, which has no grad"
    ):
        step(params, (), [])


def test_no_params() -> None:
    with pytest.raises(ValueError, match="params holds no tensors"):
        ps.make_update_step(loss_fn, SGD)({"nothing": None}, (), [])


def test_none_in_params_comes_back() -> None:
    params = {"w": torch.tensor(1.0), "bias": None}
    new, _, _ = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)(
        params, SGD.init(params), [MICROBATCH]
    )
    assert new["bias"] is None
    assert new["w"] != 1


def test_state_of_other_params() -> None:
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)
    with pytest.raises(ValueError, match=r"opt_state\.mu\['v'\] stands where opt_state\.mu\['w'\]"):
        step(PARAMS, optimizer.init({"v": torch.ones(())}), [MICROBATCH])


@pytest.mark.parametrize(
    ("optimizer", "hint"),
    [
        (ps.optim.scale_by_adam(), r"got Transform: end the chain with one: ps\.optim\.chain"),
        (
            torch.optim.SGD([torch.ones(1)], lr=0.1),
            r"got SGD: its algorithm .* is ps\.optim\.from_torch\(SGD, lr=\.\.\.\)",
        ),
        (torch.optim.AdamW, r"got AdamW: .*ps\.optim\.from_torch\(AdamW, lr=\.\.\.\)"),
        (
            torch.optim.lr_scheduler.StepLR,
            r"got StepLR: .* a schedule .*ps\.optim\.linear_schedule",
        ),
        (SCHEDULER, r"got StepLR: .* a schedule .*ps\.optim\.linear_schedule"),
        (ps.optim.adamw, r"got function: call it with its settings first"),
        (Optax(None, None), "got Optax: a NamedTuple of init"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        ps.make_update_step(loss_fn, optimizer)


def test_settings() -> None:
    with pytest.raises(ValueError, match="normalize='mean' must be one of 'loss', 'grads'"):
        step_with(normalize="mean")
    with pytest.raises(ValueError, match="on_nonfinite='raise' must be one of 'propagate', 'skip'"):
        step_with(on_nonfinite="raise")
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"accum_dtype={dtype} must be a floating point dtype"):
            step_with(accum_dtype=dtype)
    with pytest.raises(
        ValueError, match=r'weight_fn=None .* pass normalize="grads", or a weight_fn'
    ):
        step_with(weight_fn=None)
    with pytest.raises(TypeError, match="loss_fn must be a function, got dict"):
        ps.make_update_step({}, SGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn must be a function, got int"):
        ps.make_eval_step(3)  # type: ignore[arg-type]


def test_aux_of_different_structure() -> None:
    def changing(params: Any, microbatch: Any) -> ps.LossTerms:
        losses = loss_fn(params, microbatch)
        return ps.LossTerms(losses, aux={str(len(losses)): losses.sum()})

    step = ps.make_update_step(changing, SGD, weight_fn=weight_fn)
    other = {key: value[:1] for key, value in MICROBATCH.items()}
    with pytest.raises(ValueError, match=r"trees differ in structure: .*'2'.* against .*'1'"):
        step(PARAMS, SGD.init(PARAMS), [MICROBATCH, other])


def test_metrics() -> None:
    """Σ w ℓ / N, N, ‖∇L‖ and the rest, by hand."""
    _, _, metrics = step_with()
    assert metrics.loss == (4 + 9) / 2
    assert metrics.num_tokens == 2
    assert metrics.num_microbatches == 1
    assert metrics.grad_norm == abs((2 * -2 * 1 + 2 * -3 * 2) / 2)
    assert metrics.applied
    assert metrics.aux == ()
    assert all(isinstance(leaf, Tensor) for leaf in tree.leaves_of(metrics))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, normalize: Any) -> None:
    """Params keep their dtype; losses, their sum and the gradients' norm are float32."""
    params = {"w": torch.ones(2, 2, dtype=dtype)}
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(
        lambda p, m: (m @ p["w"]).sum(-1),
        optimizer,
        weight_fn=lambda m: m[:, 0] > 0,
        normalize=normalize,
    )
    new, state, metrics = step(params, optimizer.init(params), [torch.ones(3, 2, dtype=dtype)])
    assert new["w"].dtype == dtype
    assert metrics.loss.dtype == metrics.grad_norm.dtype == torch.float32
    assert {leaf.dtype for leaf in tree.leaves_of(state)} == {torch.int64, torch.float32}
    assert metrics.loss == 4


def test_microbatches_of_any_container_and_shape() -> None:
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    parts = ({key: value[:1] for key, value in MICROBATCH.items()}, MICROBATCH)
    state = SGD.init(PARAMS)
    assert torch.equal(step(PARAMS, state, parts)[0]["w"], step(PARAMS, state, list(parts))[0]["w"])


def test_flow_can_be_copied() -> None:
    """The public parts, called in order, are the step."""
    optimizer = ps.optim.adamw(0.1)
    state = optimizer.init(PARAMS)
    group = [MICROBATCH, MICROBATCH]
    axis = ps.LocalAxis()
    num_tokens = ps.psum(ps.count_tokens(group, weight_fn), axis)
    sums = ps.accumulate(loss_fn, PARAMS, group, weight_fn=weight_fn, num_tokens=num_tokens)
    grads, loss, _ = ps.psum(sums, axis)
    params, _ = optimizer.update(grads, state, PARAMS)
    expected, _, metrics = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)(
        PARAMS, state, group
    )
    assert params["w"] == expected["w"]
    assert loss == metrics.loss


def test_donation_is_ignored_where_autograd_records() -> None:
    """A tape still needs the old values."""
    rate = torch.tensor(0.1, requires_grad=True)
    step = ps.make_update_step(loss_fn, ps.optim.sgd(rate), weight_fn=weight_fn, donate=True)
    params = {"w": torch.tensor(1.0, requires_grad=True)}
    new, _, _ = step(params, SGD.init(params), [MICROBATCH])
    new["w"].backward()
    assert params["w"] == 1
    assert rate.grad == 8


def sparse(leaf: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.arange(4)[None], leaf, (4,), check_invariants=True)


def jagged(leaf: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(leaf, torch.tensor([0, 2, 4]))


class OnItsWay(Sequence[Any]):
    """A group whose microbatches are there when somebody asks for them."""

    def __init__(self, *microbatches: Any) -> None:
        self.microbatches = microbatches

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, place: Any) -> Any:
        return self.microbatches[place]


GROUPS: dict[str, Any] = {
    "list": lambda w: [{"x": w[:2]}],
    "sparse": lambda w: [{"x": sparse(w)}],
    "jagged": lambda w: [{"x": jagged(w)}],
    "on its way": lambda w: OnItsWay({"y": torch.ones(1)}, {"x": w[1:]}),
    "prefetched": lambda w: ps.prefetch([[{"x": w}]], "cpu", weight_fn=lambda _: torch.ones(4)),
}


@pytest.mark.parametrize("counted_first", [True, False])
@pytest.mark.parametrize("name", GROUPS)
def test_donation_sees_data_in_the_same_memory(name: str, counted_first: bool) -> None:
    """Whatever kind of tensor shares it, and however the group comes."""

    def loss(w: Tensor, _: Any) -> Any:
        return w if counted_first else ps.LossTerms(w, weights=torch.ones(4))

    step = ps.make_update_step(
        loss,
        SGD,
        weight_fn=(lambda _: torch.ones(4)) if counted_first else None,
        normalize="loss" if counted_first else "grads",
        donate=True,
    )
    w = torch.arange(4.0)
    group = GROUPS[name](w)
    with pytest.raises(ValueError, match="lets the update write over"):
        step(w, SGD.init(w), next(group) if name == "prefetched" else group)
    assert torch.equal(w, torch.arange(4.0))


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda x: x.expand(4, 20), True),
        (lambda x: x.unfold(0, 3, 1), True),
        (lambda x: x.unfold(0, 3, 2)[:, ::2], True),
        (lambda x: x.unfold(0, 3, 3), False),
        (lambda x: x[::2], False),
        (lambda x: x.view(4, 5).t()[1:, ::2], False),
    ],
)
def test_donation_sees_a_leaf_that_overlaps_itself(make: Any, refused: bool) -> None:
    """By any strides; a leaf with gaps, or in another order, is given away like any other."""
    w = make(torch.arange(20.0))
    step = ps.make_update_step(
        lambda w, _: w, SGD, weight_fn=lambda _: torch.ones(w.shape), donate=True
    )
    if refused:
        with pytest.raises(ValueError, match="overlaps itself"):
            step(w, SGD.init(w), [()])
    else:
        expected = w - 0.1 / w.numel()
        assert step(w, SGD.init(w), [()])[0] is w
        torch.testing.assert_close(w, expected)


def test_outputs_are_no_views_of_inputs() -> None:
    """What a loss hands out as aux may be a parameter; the metrics hold a copy, donated or not."""
    step = ps.make_update_step(
        lambda p, m: ps.LossTerms(loss_fn(p, m), aux=p["w"]), SGD, weight_fn=weight_fn, donate=True
    )
    params = tree.map(torch.clone, PARAMS)
    new, _, metrics = step(params, SGD.init(params), [MICROBATCH])
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert metrics.aux == 1 != new["w"]


def test_a_buffer_is_given_away_once() -> None:
    w = torch.ones(2)
    params = {"a": w, "b": w}
    step = ps.make_update_step(
        lambda p, m: p["a"] * p["b"] * m, SGD, weight_fn=torch.ones_like, donate=True
    )
    with pytest.raises(
        ValueError, match=r"\[0\]\['a'\] and \(.*\)\[0\]\['b'\] share memory: clone one of them"
    ):
        step(params, SGD.init(params), [torch.ones(2)])


def test_memory_that_is_given_away_is_not_the_datas() -> None:
    """Whichever leaf and microbatch it is; neighbours in one buffer are fine."""
    buffer = torch.arange(12.0)
    params = {"a": buffer[:2], "b": buffer[4:6], "c": buffer[8:10]}
    step = ps.make_update_step(
        lambda p, m: (p["a"] + p["b"] + p["c"]) * m["x"],
        SGD,
        weight_fn=lambda m: torch.ones(2),
        donate=True,
    )
    apart = [{"x": buffer[2:4]}, {"x": buffer[6:8]}, {"x": buffer[10:]}]
    for start, name in ((0, "a"), (1, "a"), (3, "b"), (5, "b"), (7, "c"), (9, "c")):
        before = buffer.clone()
        with pytest.raises(
            ValueError, match=rf"\[0\]\['{name}'\], but microbatches\[3\]\['x'\] shares its memory"
        ):
            step(params, SGD.init(params), [*apart, {"x": buffer[start : start + 2]}])
        assert torch.equal(buffer, before)
    data = [buffer[2:4].clone(), buffer[6:8].clone(), buffer[10:].clone()]
    step(params, SGD.init(params), apart)
    assert all(torch.equal(part["x"], old) for part, old in zip(apart, data, strict=True))


@pytest.mark.parametrize("donate", [False, True])
def test_state_keeps_its_shapes_and_dtypes(donate: bool) -> None:
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, donate=donate)
    params = {"w": torch.ones(2)}
    stale = optimizer.init({"w": torch.ones(2, 1)})
    with pytest.raises(
        ValueError,
        match=r"by optimizer\.init of these.*opt_state\.mu\['w'\] is torch.float32 of shape \(2, 1\), and",
    ):
        step(params, stale, [MICROBATCH])
    with pytest.raises(ValueError, match=r"it is \(DescentState.*, and AdamWState.* was expected"):
        step(params, SGD.init(params), [MICROBATCH])
    for how in ({"normalize": "grads"}, {"accum_dtype": torch.float64}):
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, donate=donate, **how)
        scalar = tree.map(torch.clone, PARAMS)
        state = optimizer.init(scalar)
        kinds = [leaf.dtype for leaf in tree.leaves_of(state)]
        _, state, _ = step(scalar, state, [MICROBATCH])
        assert [leaf.dtype for leaf in tree.leaves_of(state)] == kinds


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_weights_beyond_the_losses_dtype(scale: float) -> None:
    """Only their ratio to N matters, so it is what is rounded."""
    scaled = step_with(weight_fn=lambda m: torch.full_like(m["x"], scale, dtype=torch.float64))
    assert torch.equal(scaled[0]["w"], step_with()[0]["w"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "dp"}, r"axis must be an axis object, got 'dp'"),
        ({"axis": ps.VmapAxis}, "axis must be an axis object"),
        ({"grad_and_value": None}, "grad_and_value must be a function, got NoneType"),
        ({"weight_fn": torch.ones(1)}, "weight_fn must be a function, got Tensor"),
        ({"optimizer": ps.optim.adamw}, r"got function: call it with its settings first"),
        (
            {"loss": lambda p, m: (loss_fn(p, m), 1)},
            r"returned a tuple of 2: .*ps\.LossTerms\(tokens",
        ),
    ],
)
def test_first_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        step_with(**arguments)


def test_a_module_is_not_its_params() -> None:
    with pytest.raises(TypeError, match=r"params is a module, Linear: .*functional_call"):
        ps.make_update_step(loss_fn, SGD)(torch.nn.Linear(1, 1), (), [])


def test_aux_of_different_shapes_is_not_broadcast() -> None:
    step = ps.make_update_step(
        lambda p, m: ps.LossTerms(loss_fn(p, m), aux=m["x"]), SGD, weight_fn=weight_fn
    )
    other = {key: value[:1] for key, value in MICROBATCH.items()}
    with pytest.raises(ValueError, match=r"shape \(2,\) in one microbatch and \(1,\) in another"):
        step(PARAMS, SGD.init(PARAMS), [MICROBATCH, other])


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_labels_that_the_loss_shifts(normalize: Any) -> None:
    """Counted before they are shifted: one too many in each row, and the message says how to shift them."""
    x = torch.randn(2, 5, 3)
    labels = torch.zeros(2, 6, dtype=torch.int64)
    step = ps.make_update_step(
        lambda p, m: ps.losses.cross_entropy(m["x"] * p["w"], m["labels"][:, 1:]),
        SGD,
        normalize=normalize,
    )
    with pytest.raises(
        ValueError, match=r"dimension 1 differs by one, as where loss_fn shifts the labels: shift"
    ):
        step(PARAMS, SGD.init(PARAMS), [{"x": x, "labels": labels}])


@pytest.mark.parametrize("labels", [np.zeros((2, 5), dtype=np.int64), [[0] * 5] * 2])
def test_labels_that_are_no_tensor(labels: Any) -> None:
    with pytest.raises(
        TypeError, match=r"microbatch\['labels'\] is a (ndarray|list), not a tensor"
    ):
        ps.make_update_step(loss_fn, SGD)(PARAMS, SGD.init(PARAMS), [{"labels": labels}])


def test_params_in_eight_bits() -> None:
    params = {"w": torch.ones(2).to(torch.float8_e4m3fn)}
    with pytest.raises(TypeError, match=r"params\['w'\] is torch.float8_e4m3fn, in which neither"):
        ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)(params, (), [MICROBATCH])


class Lying(Sequence[Any]):
    """Says that it has one microbatch more, or fewer, than it yields."""

    def __init__(self, parts: list[Any], length: int) -> None:
        self.parts, self.length = parts, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_sequence_whose_length_lies(length: int) -> None:
    """What was counted is what is computed; where nothing is counted first, the length is held to what it says."""
    group = Lying([MICROBATCH, {**MICROBATCH, "x": torch.ones(2)}], length)
    assert torch.equal(step_with(group=group)[0]["w"], step_with(group=group.parts)[0]["w"])
    with pytest.raises(ValueError, match=f"a Lying of which {length} microbatches were expected"):
        step_with(group=group, normalize="grads")
    with pytest.raises(ValueError, match=f"a Lying of which {length} microbatches were expected"):
        ps.accumulate(loss_fn, PARAMS, group, weight_fn=weight_fn)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    assert evaluate(PARAMS, group).loss == evaluate(PARAMS, group.parts).loss


def test_counts_are_asked_for_once_in_evaluation() -> None:
    asked = []

    def counting(microbatch: Any) -> Tensor:
        asked.append(microbatch)
        return weight_fn(microbatch)

    ps.make_eval_step(loss_fn, weight_fn=counting)(PARAMS, [MICROBATCH] * 3)
    assert len(asked) == 3


def test_an_overflowing_count_is_not_applied_where_it_cannot_be_read() -> None:
    """Under a transform it is the identity, for the member that it concerns."""
    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda m: m["w"].expand(2))

    def stepped(weight: Tensor) -> tuple[Tensor, Tensor]:
        new, _, metrics = step(PARAMS, SGD.init(PARAMS), [{**MICROBATCH, "w": weight}])
        return new["w"], metrics.applied

    w, applied = torch.vmap(stepped)(torch.tensor([1.0, 1e308], dtype=torch.float64))
    assert applied.tolist() == [True, False]
    assert w[1] == PARAMS["w"] != w[0]


class Anew(Sequence[Any]):
    """Makes its microbatches whenever it is asked, with masks drawn anew, as for masked language models."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError
        mask = torch.randint(0, 2, (8,), generator=self.generator)
        return {"x": mask.float(), "y": torch.zeros(8), "mask": mask}


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_sequence_that_makes_its_microbatches_anew(normalize: Any) -> None:
    """Those that are counted are those that are computed: the loss of every counted token is w² = 1."""
    settings = {"normalize": normalize, "weight_fn": lambda m: m["mask"]}
    _, _, metrics = step_with(group=Anew(), **settings)
    assert metrics.loss == 1
    evaluate = ps.make_eval_step(loss_fn, weight_fn=settings["weight_fn"])
    assert evaluate(PARAMS, Anew()).loss == 1


@pytest.mark.parametrize("fold", [lambda w: w[:1].expand(3), lambda w: w.unfold(0, 2, 1)])
def test_a_leaf_that_overlaps_itself_is_not_given_away(fold: Any) -> None:
    params = {"w": fold(torch.ones(3))}
    step = ps.make_update_step(
        lambda p, m: p["w"].sum() * m, SGD, weight_fn=torch.ones_like, donate=True
    )
    with pytest.raises(ValueError, match=r"\[0\]\['w'\] overlaps itself"):
        step(params, SGD.init(params), [torch.ones(2)])
