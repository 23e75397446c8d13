"""What the theorems are drawn from: cases, cuts, ranks, settings, and the two strengths of equality.

**Exact**: integers in float64 and N a power of two make every operation exact, so the claim is bitwise.
**Bounded**: for real models, the a-priori bound γₙ Σ‖gₘ‖ of floating point summation, with
γₙ = n u / (1 − n u), u the unit roundoff of the dtype, n the roundings in a row, gₘ the exact
gradient of sequence m. Nothing is tuned.

Hypothesis draws one number, from which a ``Chooser`` makes the case: all that may be chosen comes
equally often. (Hypothesis itself repeats itself: of its groups, two of three were one microbatch.)
"""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from purestep import optim, tree
from purestep.testing.bounds import gamma

settings.register_profile("default", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

Batch = dict[str, Tensor]
Cut = list[list[int]]
"""Which rows each microbatch holds, in order."""
Groups = list[list[Batch]]
"""The microbatches of each rank."""
T = TypeVar("T")


class Chooser(random.Random):
    """Chooses evenly, from one number. Small numbers make small cases, to which a failure shrinks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.most = min(6, 1 + number.bit_length() // 2)

    def maybe(self) -> bool:
        """Yes or no."""
        return self.random() < 0.5

    def generator(self) -> torch.Generator:
        """A source of tensors."""
        return torch.Generator().manual_seed(self.randrange(2**20))


@st.composite
def drawn(draw: st.DrawFn, make: Callable[..., T], /, *args: Any, **how: Any) -> T:
    """All that ``make(choose, *args, **how)`` makes."""
    return make(Chooser(draw(st.integers(0, 2**20))), *args, **how)


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    """Matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


EPS = 0.125
"""So large that a step of Adam is smooth where gradients are small."""
RECIPES: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    "descend": optim.descend,
    "momentum": partial(
        optim.sgd, momentum=0.9, nesterov=True, weight_decay=0.1, mask=matrices
    ),
    "clipped": lambda rate: optim.chain(
        optim.clip_by_global_norm(1.0), optim.sgd(rate, 0.5)
    ),
    "adamw": partial(optim.adamw, eps=EPS),
    "masked adamw": partial(
        optim.adamw, b1=0.5, b2=0.9, eps=EPS, weight_decay=0.1, mask=matrices
    ),
    "lion": partial(optim.lion, weight_decay=0.1),
    "adam": lambda rate: optim.chain(optim.scale_by_adam(eps=EPS), optim.descend(rate)),
    "partition": lambda rate: optim.partition(
        labels,
        {
            "matrix": optim.adamw(rate, eps=EPS),
            "rest": optim.sgd(rate, 0.9, nesterov=True),
        },
    ),
    "master": lambda rate: optim.master_weights(optim.sgd(rate, 0.9)),
    "ema": lambda rate: optim.ema(optim.sgd(rate, 0.9), 0.9),
}
"""Optimizers of a learning rate, in which most operations round."""

OPTIMIZERS: dict[str, ps.optim.Optimizer] = {
    "sgd": optim.sgd(0.5),
    "momentum": optim.sgd(0.25, momentum=0.5, nesterov=True, weight_decay=0.5),
    "decayed": optim.sgd(0.5, weight_decay=0.5, mask=matrices),
    "scheduled": optim.sgd(optim.linear_schedule(0.5, 0.25, 4)),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
    "adamw": optim.adamw(0.125, weight_decay=0.5),
    "adam": optim.chain(optim.scale_by_adam(), optim.descend(0.125)),
    "lion": optim.lion(0.125, weight_decay=0.5, mask=matrices),
    "partition": optim.partition(
        labels, {"matrix": optim.sgd(0.5, momentum=0.5), "rest": optim.adamw(0.125)}
    ),
    "master": optim.master_weights(optim.sgd(0.5)),
    "ema": optim.ema(optim.sgd(0.5, momentum=0.5), 0.75),
}
EXACT = ["sgd", "momentum", "decayed", "scheduled", "master", "ema"]
"""Those of which no operation rounds in narrower dtypes either, so that kernels may fuse them."""


def weights_of(batch: Batch) -> Tensor:
    """The weights stand in the batch."""
    return batch["w"]


@dataclass(frozen=True, repr=False)
class Case:
    """A group of sequences as one big batch, a model, an optimizer and a state to start from."""

    params: Any
    batch: Batch
    recipe: str
    opt_state: Any
    seed: int

    @property
    def optimizer(self) -> ps.optim.Optimizer:
        """The optimizer of that name."""
        return OPTIMIZERS[self.recipe]

    @property
    def loss_fn(self) -> Callable[[Any, Batch], Tensor]:
        """A loss of which nothing rounds in the dtype of the params."""
        half = self.batch["x"].dtype.itemsize < 4
        return models.linear_loss if half else models.integer_loss

    def __repr__(self) -> str:
        return (
            f"Case(seed={self.seed}, w={self.batch['w']}, opt_state={self.opt_state})"
        )

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self.batch["w"])

    @property
    def generator(self) -> torch.Generator:
        """Fresh noise, the same every time."""
        return torch.Generator().manual_seed(self.seed + 1)


WEIGHTS = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float64,
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TARGETS = (torch.uint8, torch.int64)
"""Dtypes of targets beside those of the params."""


def case_of(
    choose: Chooser,
    *,
    fractional: bool = True,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    trees: bool = False,
    keyed: bool = False,
) -> Case:
    """Integer data and parameters; weights of which many are 0, and whose sum is a power of two.

    ``trees``: params are no bare tensor. ``keyed``: rows have keys, for attention with dropout.
    """
    seed = choose.randrange(2**20)
    generator = torch.Generator().manual_seed(seed)
    rows, length = (
        choose.randint(1, choose.most),
        choose.randint(1, min(4, choose.most)),
    )
    recipes = [name for name in OPTIMIZERS if torch.float64 in dtypes or name in EXACT]
    # Squares of attention's gradients do not add up exactly.
    recipe = choose.choice(
        [name for name in recipes if not (keyed and name == "clipped")]
    )
    kind = choose.choice(
        [each for each in WEIGHTS if fractional or not each.is_floating_point]
    )
    dtype = choose.choice(dtypes if recipe in EXACT else [torch.float64])
    weights = weights_for(choose, rows * length, kind).view(rows, length)
    batch = integer_batch(weights, generator)
    batch["x"], batch["y"] = batch["x"].to(dtype), batch["y"].to(dtype)
    if choose.maybe():
        batch["y"] = batch["y"].abs().to(choose.choice(TARGETS))
    if keyed:
        batch["key"] = ps.random.fold_in(ps.random.key(seed), torch.arange(rows))
    params: Any = models.integer_params(generator)
    if choose.maybe():
        params["unused"] = models.integers((3,), generator)
    elif not (trees or keyed or choose.randrange(4)):
        params = models.in_one(params)
    params = tree.map(lambda leaf: leaf.to(dtype), params)
    params = laid_out(params, choose.choice(LAYOUTS))
    opt_state = some_opt_state(recipe, params, generator)
    opt_state = laid_out(opt_state, choose.choice(LAYOUTS[:3]))
    # Trees are the same whatever the order of their keys, and need not have it in common.
    state = params, opt_state
    params, opt_state = (
        turned_around(each) if choose.maybe() else each for each in state
    )
    return Case(params, batch, recipe, opt_state, seed)


def weights_for(choose: Chooser, size: int, kind: torch.dtype) -> Tensor:
    """A weight for each token, some of them 0; often as many as tokens, or a single one."""
    number = choose.choice([1, 2, 4, 8, 16, 16])
    if kind == torch.bool:
        places = choose.sample(range(size), min(number, 1 << (size.bit_length() - 1)))
    else:
        places = choose.choices(range(size), k=number)
    weights = torch.bincount(torch.tensor(places), minlength=size).to(kind)
    return weights / choose.choice([1, 16, 256]) if kind == torch.float64 else weights


def turned_around(given: Any) -> Any:
    """The same tree, the keys of its dicts in the opposite order."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, dict):
        return {key: turned_around(given[key]) for key in reversed(given)}
    inside = [turned_around(each) for each in given]
    return type(given)(*inside) if hasattr(given, "_fields") else type(given)(inside)


LAYOUTS = ["rows", "columns", "gaps", "one buffer", "one tensor"]
"""How leaves may lie in memory."""


def laid_out(params: Any, layout: str) -> Any:
    """Columns one after the other, gaps between all elements, parts of one buffer, or one tensor for two leaves."""
    if layout == "columns":
        return tree.map(
            lambda leaf: leaf.T.contiguous().T if leaf.ndim == 2 else leaf, params
        )
    if layout == "gaps":
        return tree.map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0], params)
    if layout == "one buffer":
        leaves, structure = tree.flatten(params)
        buffer = torch.cat([leaf.reshape(-1) for leaf in leaves])
        parts = buffer.split([leaf.numel() for leaf in leaves])
        pairs = zip(parts, leaves, strict=True)
        return tree.unflatten(structure, [part.view_as(leaf) for part, leaf in pairs])
    if layout == "one tensor" and isinstance(params, dict):
        bias = params["hidden"]["biases"][0]
        return {**params, "hidden": {**params["hidden"], "biases": [bias, bias]}}
    return params


def copied(state: Any) -> Any:
    """A copy to be given away, which lies in memory as the state does."""

    def copy(leaf: Tensor) -> Tensor:
        if leaf.device.type == "lazy":
            return leaf.clone()
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
        ).copy_(leaf)

    return tree.map(copy, state)


def some_opt_state(recipe: str, params: Any, generator: torch.Generator) -> Any:
    """A state of small integers, as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.randint(0, 4, leaf.shape, generator=generator).to(
            leaf.dtype
        ),
        OPTIMIZERS[recipe].init(params),
    )


def integer_batch(weights: Tensor, generator: torch.Generator) -> Batch:
    """Integer inputs and targets for these weights."""
    rows, length = weights.shape
    return {
        "x": models.integers((rows, length, models.FEATURES), generator),
        "y": models.integers((rows, length), generator),
        "w": weights,
    }


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of it."""
    return {key: value[list(rows)] for key, value in batch.items()}


def cut(batch: Batch, microbatches: Cut) -> list[Batch]:
    """The microbatches of a cut."""
    return [taken(batch, rows) for rows in microbatches]


def cut_of(
    choose: Chooser, rows: Sequence[int], numbers: range, *, empty: bool = True
) -> Cut:
    """Any cut of the rows into so many microbatches; without ``empty`` ones, into no more than there are rows."""
    number = choose.choice(numbers)
    if empty:
        ends = sorted(choose.choices(range(len(rows) + 1), k=number - 1))
    else:
        ends = sorted(choose.sample(range(1, len(rows)), min(number, len(rows)) - 1))
    return [[*rows[a:b]] for a, b in itertools.pairwise([0, *ends, len(rows)])]


RANKS = (1, 2, 3, 4)


def shares_of(
    choose: Chooser, rows: int, *, ranks: Sequence[int] = RANKS, shuffled: bool = True
) -> list[Cut]:
    """The rows of each microbatch of each rank: one rank has two to nine, of several some have none."""
    order, size = choose.sample(range(rows), rows), choose.choice(ranks)
    owners = [choose.randrange(size) for _ in order]
    numbers = range(2, choose.most + 4) if size == 1 else range(1, 5)
    empty = rows == 1 or choose.maybe()
    shares: list[Cut] = []
    for rank in range(size):
        own = [row for row, owner in zip(order, owners, strict=True) if owner == rank]
        nothing = not own and (not empty or choose.maybe())
        own = own if shuffled else sorted(own)
        shares.append([] if nothing else cut_of(choose, own, numbers, empty=empty))
    return shares


def groups_of(
    choose: Chooser,
    case: Case,
    *,
    padded: bool = True,
    scalars: bool = True,
    **how: Any,
) -> Groups:
    """The microbatches of each rank: any cut of the case, in any order, and padded anywhere.

    Some of them are empty, some ranks have none, and those of one token may be scalars.
    """
    scalars = scalars and "key" not in case.batch and choose.maybe()
    groups: Groups = []
    for share in shares_of(choose, case.rows, **how):
        groups.append([])
        for microbatch in cut(case.batch, share):
            if padded and choose.maybe():
                more = choose.randrange(3), choose.randrange(3)
                microbatch = with_noise(case, microbatch, *more)
                groups[-1] += [ignored_like(case, microbatch)] * choose.randrange(2)
            if scalars and microbatch["w"].numel() == 1:
                microbatch = {key: leaf[0, 0] for key, leaf in microbatch.items()}
            groups[-1].append(microbatch)
    return groups


def with_noise(case: Case, microbatch: Batch, rows: int, columns: int) -> Batch:
    """The microbatch with ignored rows and columns, in which anything stands."""
    size, length = microbatch["w"].shape
    larger = ignored_like(
        case, taken(case.batch, [0] * (size + rows)), length + columns
    )
    for key, leaf in microbatch.items():
        larger[key][tuple(map(slice, leaf.shape))] = leaf
    return larger


def ignored_like(case: Case, microbatch: Batch, length: int = 0) -> Batch:
    """A microbatch without tokens, in which anything stands."""
    size = (len(microbatch["w"]), length or microbatch["w"].shape[1])
    noise = integer_batch(microbatch["w"].new_zeros(size), case.generator)
    noise["key"] = torch.arange(len(microbatch["w"]))
    return {key: noise[key].to(leaf.dtype) for key, leaf in microbatch.items()}


Axis = Literal["one", "simulated", "threads"]
AXES: tuple[Axis, ...] = ("one", "simulated", "threads")
GATHERS = ["step", "microbatch", "loss", "loss, recomputed"]
"""Where a gather may stand; a loss that is computed again gathers twice."""
GRIDS = [(0, 1), (1, 2), (2, 2)]


class How(NamedTuple):
    """How a step is taken: on which kind of ranks, on whole params or pieces, and with which settings.

    Pieces lie along an axis of ranks, or along the rows of a grid, filled up to a multiple of ranks.
    """

    axis: Axis
    settings: dict[str, Any]
    gather: str = ""
    grid: tuple[int, int] = (0, 1)
    bucket_bytes: int = 40


SETTINGS: dict[str, list[Any]] = {
    "normalize": ["loss", "grads"],
    "on_nonfinite": ["propagate", "skip"],
    "donate": [False, True],
    "accum_dtype": [None, torch.float64, torch.float32],
    "grad_and_value": [ps.grad_and_value, torch.func.grad_and_value],
}


def settings_of(choose: Chooser, **fixed: Any) -> dict[str, Any]:
    """Keyword arguments of ``make_update_step`` that make no difference; some may be fixed."""
    return {
        **{name: choose.choice(values) for name, values in SETTINGS.items()},
        **fixed,
    }


def how_of(
    choose: Chooser,
    *,
    axes: Sequence[Axis] = AXES,
    gathers: Sequence[str] = ("", "", "", *GATHERS),
    grids: Sequence[tuple[int, int]] = GRIDS,
    **fixed: Any,
) -> How:
    """Any way to take a step: the whole space from which the theorems draw."""
    axis, settings = choose.choice(axes), settings_of(choose, **fixed)
    gather = choose.choice(gathers) if axis != "one" else ""
    grid = choose.choice(grids) if axis == "threads" and gather else (0, 1)
    return How(axis, settings, gather, grid, choose.choice([8, 40, 1 << 20]))


Drawn = tuple[Case, How, Groups]


def step_case(
    choose: Chooser,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    fractional: bool = True,
    trees: bool = False,
    keyed: bool = False,
    ranks: Sequence[int] = RANKS,
    shuffled: bool = True,
    padded: bool = True,
    scalars: bool = True,
    **how: Any,
) -> Drawn:
    """A case, how a step of it is taken, and the microbatches of each rank."""
    case = case_of(
        choose, dtypes=dtypes, fractional=fractional, trees=trees, keyed=keyed
    )
    # Gradients of attention are not exact in float32.
    made = how_of(choose, **(how | {"accum_dtype": None} if keyed else how))
    split: Any = {
        "ranks": ranks,
        "shuffled": shuffled,
        "padded": padded,
        "scalars": scalars,
    }
    return case, made, groups_of(choose, case, **split)


steps = partial(drawn, step_case)
"""Cases of steps; keywords narrow them."""


def side_by_side(groups: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Microbatches with a leading dimension of ranks, smaller ones filled up with zeros."""
    return [
        {
            key: torch.stack(
                [filled(p.get(key), [q[key] for q in parts if q]) for p in parts]
            )
            for key in next(part for part in parts if part)
        }
        for parts in itertools.zip_longest(*groups, fillvalue={})
    ]


def filled(leaf: Tensor | None, others: list[Tensor]) -> Tensor:
    """Zeros in the shape of the largest of these leaves, with this leaf in their corner."""
    most = max(other.ndim for other in others)
    shapes = [(1,) * (most - other.ndim) + other.shape for other in others]
    zeros = others[0].new_zeros([max(sizes) for sizes in zip(*shapes, strict=True)])
    if leaf is not None:
        corner = (0,) * (most - leaf.ndim) + tuple(slice(size) for size in leaf.shape)
        zeros[corner] = leaf
    return zeros


def stack(trees: Sequence[Any]) -> Any:
    """One tree, whose leaves have a new dimension in front."""
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def assert_same(actual: Any, expected: Any, what: str = "state") -> None:
    """Trees of one structure, with leaves of one dtype, equal to the bit."""
    actual_leaves, actual_structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert actual_structure == expected_structure, f"{what}: another structure"
    for place, (a, b) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        if a.dtype != b.dtype or not torch.equal(a, b):
            path = tree.paths(expected, what)[place]
            raise AssertionError(f"{path}: {a} ({a.dtype}) is not {b} ({b.dtype})")


def assert_near(actual: Any, expected: Any, before: Any, roundings: int = 0) -> None:
    """States after a step, each leaf off by roundings of what it was and of what it moved by.

    A step has norms over all elements, and a formula with its powers of β.
    """
    elements = sum(leaf.numel() for leaf in tree.leaves(before[0]))
    bound = gamma(2 * (elements + 64) + roundings, torch.float64)
    every = map(tree.leaves, (actual, expected, before))
    for path, *leaves in zip(tree.paths(before, "state"), *every, strict=True):
        ours, theirs, old = (leaf.to(torch.float64) for leaf in leaves)
        error, scale = (ours - theirs).abs(), old.abs() + (theirs - old).abs()
        assert (error <= bound * scale).all(), f"{path}: off by {error}"


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of a call: its result, or None and the message with which it, or a rank, refuses."""
    try:
        return call(), ""
    except (ValueError, AssertionError) as error:
        return None, f"{error}: {error.__cause__}"


CAPTURE = ps.optim.Optimizer(
    init=tree.zeros_like,
    update=lambda grads, opt_state, params: (
        params,
        tree.map(lambda grad, kept: grad.to(kept.dtype), grads, opt_state),
    ),
)
"""An optimizer that moves nothing and keeps the gradients that it was given as its state."""


@dataclass(frozen=True, repr=False)
class RealCase:
    """Sequences for the transformer, and the exact gradient and loss of each, scaled as in the equation."""

    params: Any
    batch: Batch
    dtype: torch.dtype
    exact: Callable[[], tuple[list[Any], Tensor]]
    seed: int

    def __repr__(self) -> str:
        return f"RealCase(seed={self.seed}, {self.dtype}, w={self.batch['w'].sum(1).tolist()})"

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self.batch["w"])

    def assert_within_bound(self, grads: Any, extra_roundings: int = 0) -> None:
        """|grads − Σ gₘ| ≤ γₙ Σ ‖gₘ‖ in every leaf."""
        n = models.transformer_roundings(self.dtype) + self.rows + extra_roundings
        for path, leaf, *terms in zip(
            tree.paths(grads, "grads"),
            tree.leaves(grads),
            *map(tree.leaves, self.exact()[0]),
            strict=True,
        ):
            exact = torch.stack(terms)
            bound = gamma(n, self.dtype) * exact.flatten(1).norm(dim=1).sum()
            error = (leaf.to("cpu", torch.float64) - exact.sum(0)).norm()
            assert error <= bound, (
                f"{path}: off by {error:.3g}, and rounding explains {bound:.3g}"
            )

    def assert_loss_within_bound(self, loss: Tensor) -> None:
        """The same for the loss."""
        n, losses = models.transformer_roundings(self.dtype), self.exact()[1]
        error = (loss.to("cpu", torch.float64) - losses.sum()).abs()
        assert (
            error <= gamma(n + self.batch["w"].numel(), self.dtype) * losses.abs().sum()
        )


def real_case(
    choose: Chooser,
    dtypes: Sequence[torch.dtype] = DTYPES[:3],
    loss_fn: Callable[[Any, Batch], Tensor] = models.transformer_loss,
    make_params: Callable[
        [torch.Generator, torch.dtype], Any
    ] = models.transformer_params,
    *,
    keyed: bool = False,
) -> RealCase:
    """Random text of uneven length, padded, for the transformer in one of the dtypes; ``keyed``: each with a key."""
    dtype, seed = choose.choice(dtypes), choose.randrange(2**20)
    generator = torch.Generator().manual_seed(seed)
    rows = choose.randint(1, min(5, choose.most))
    lengths = [choose.randint(row == 0, models.CONTEXT) for row in range(rows)]
    shape = (rows, models.CONTEXT)
    present = torch.arange(models.CONTEXT) < torch.tensor(lengths)[:, None]
    labels = torch.randint(0, models.VOCABULARY, shape, generator=generator)
    batch = {
        "tokens": torch.randint(0, models.VOCABULARY, shape, generator=generator),
        "labels": torch.where(present, labels, -100),
        "w": present,
    }
    if keyed:
        batch["key"] = ps.random.fold_in(ps.random.key(seed), torch.arange(rows))
    params = make_params(generator, dtype)

    def loss_of(params: Any, row: int) -> Tensor:
        return loss_fn(params, taken(batch, [row])).sum() / present.sum()

    @cache
    def exact() -> tuple[list[Any], Tensor]:
        wide = tree.map(lambda leaf: leaf.to(torch.float64), params)
        made = [torch.func.grad_and_value(loss_of)(wide, row) for row in range(rows)]
        return [grads for grads, _ in made], torch.stack([loss for _, loss in made])

    return RealCase(params, batch, dtype, exact, seed)


RealDrawn = tuple[RealCase, How, Groups]


def real_step_case(
    choose: Chooser,
    *,
    ranks: Sequence[int] = RANKS,
    axes: Sequence[Axis] = AXES,
    **of_case: Any,
) -> RealDrawn:
    """Real text in any order, cut and share, each microbatch perhaps no longer than it has to be."""
    case = real_case(choose, **of_case)
    groups: Groups = []
    for share in shares_of(choose, case.rows, ranks=ranks):
        groups.append([part for part in cut(case.batch, share) if part["w"].numel()])
        if choose.maybe():
            groups[-1] = [without_padding(part) for part in groups[-1]]
    # Sums in float32 would round more than the dtype does.
    accum_dtype = choose.choice([None, torch.float64])
    return case, how_of(choose, axes=axes, accum_dtype=accum_dtype), groups


def without_padding(part: Batch) -> Batch:
    """As long as the longest of its sequences, or of one token."""
    length = max(1, int(part["w"].sum(1).max()))
    return {
        key: leaf if leaf.ndim == 1 else leaf[:, :length] for key, leaf in part.items()
    }


real_steps = partial(drawn, real_step_case)
"""Cases of steps of the transformer; keywords narrow them."""
