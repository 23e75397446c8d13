"""What the theorems are drawn from: cases, cuts, ranks, and the two strengths of equality.

**Exact**: integers in float64 and N a power of two make every operation exact, so the claim is bitwise.
**Bounded**: for real models, the a-priori bound γₙ Σ‖gₘ‖ of floating point summation, with
γₙ = n u / (1 − n u), u the unit roundoff of the dtype, n the roundings in a row, gₘ the exact
gradient of sequence m. Nothing is tuned.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs import models, writings
from proofs.writings import Cut, cuts, taken
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec

settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=60, database=None
)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

Batch = dict[str, Tensor]
Groups = list[list[Batch]]
"""The microbatches of each rank."""


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    """Matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


RECIPES: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    "sgd": lambda optim: optim.sgd(0.5),
    "momentum": lambda optim: optim.sgd(0.25, momentum=0.5, nesterov=True, weight_decay=0.5),
    "decayed": lambda optim: optim.sgd(0.5, weight_decay=0.5, mask=matrices),
    "scheduled": lambda optim: optim.sgd(optim.linear_schedule(0.5, 0.25, 4)),
    "clipped": lambda optim: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
    "adamw": lambda optim: optim.adamw(0.125, weight_decay=0.5),
    "adam": lambda optim: optim.chain(optim.scale_by_adam(), optim.descend(0.125)),
    "lion": lambda optim: optim.lion(0.125, weight_decay=0.5, mask=matrices),
    "partition": lambda optim: optim.partition(
        labels, {"matrix": optim.sgd(0.5, momentum=0.5), "rest": optim.adamw(0.125)}
    ),
    "master": lambda optim: optim.master_weights(optim.sgd(0.5)),
    "ema": lambda optim: optim.ema(optim.sgd(0.5, momentum=0.5), 0.75),
}
"""Optimizers, of whatever ``purestep.optim`` a system has."""
EXACT = ["sgd", "momentum", "decayed", "scheduled", "master", "ema"]
"""Those of which no operation rounds in narrower dtypes either, so that kernels may fuse them."""
OPTIMIZERS = {name: make(ps.optim) for name, make in RECIPES.items()}


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
        return f"Case(seed={self.seed}, w={self.batch['w']}, opt_state={self.opt_state})"

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self.batch["w"])

    @property
    def generator(self) -> torch.Generator:
        """Fresh noise, the same every time."""
        return torch.Generator().manual_seed(self.seed + 1)


WEIGHTS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    fractional: bool = True,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    dtypes: Sequence[torch.dtype] = (torch.float64,),
) -> Case:
    """Integer data and parameters; weights of which many are 0, and whose sum is a power of two."""
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    kinds = [kind for kind in WEIGHTS if fractional or not kind.is_floating_point]
    kind, dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(dtypes))
    drawn = writings.weights(rows, length, mask=kind == torch.bool)
    weights = torch.tensor(draw(drawn)).to(kind)
    if kind == torch.float64:
        weights = weights / draw(st.sampled_from([1, 16, 256]))
    params = models.integer_params(generator)
    if draw(st.booleans()):
        params["unused"] = models.integers((3,), generator)
    params = laid_out(params, draw(st.sampled_from(LAYOUTS)))
    params, batch = tree.map(
        lambda leaf: leaf.to(dtype) if leaf.dtype == torch.float64 else leaf,
        (params, integer_batch(torch.zeros_like(weights, dtype=torch.bool), generator)),
    )
    exact = dtype == torch.float64
    recipe = draw(st.sampled_from([name for name in optimizers if exact or name in EXACT]))
    opt_state = some_opt_state(recipe, params, generator)
    # Trees are the same whatever the order of their keys, and need not have it in common.
    params, opt_state = (
        turned_around(each) if draw(st.booleans()) else each for each in (params, opt_state)
    )
    return Case(params, {**batch, "w": weights}, recipe, opt_state, seed)


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
        return tree.map(lambda leaf: leaf.T.contiguous().T if leaf.ndim == 2 else leaf, params)
    if layout == "gaps":
        return tree.map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0], params)
    if layout == "one buffer":
        leaves, structure = tree.flatten(params)
        buffer = torch.cat([leaf.reshape(-1) for leaf in leaves])
        parts = buffer.split([leaf.numel() for leaf in leaves])
        return tree.unflatten(
            structure, [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        )
    if layout == "one tensor":
        bias = params["hidden"]["biases"][0]
        return {**params, "hidden": {**params["hidden"], "biases": [bias, bias]}}
    return params


def some_opt_state(recipe: str, params: Any, generator: torch.Generator) -> Any:
    """A state of small integers, as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.randint(0, 4, leaf.shape, generator=generator).to(leaf.dtype),
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


def cut(batch: Batch, microbatches: Cut) -> list[Batch]:
    """The microbatches of a cut."""
    return [taken(batch, rows) for rows in microbatches]


@st.composite
def assignments(draw: st.DrawFn, rows: int) -> list[Cut]:
    """Any assignment of rows to ranks, and any cut on each: uneven ranks, and ranks without data."""
    shares = draw(writings.ranks(range(rows)))
    return [[[own[i] for i in part] for part in draw(cuts(len(own), 3))] for own in shares]


@st.composite
def shares(draw: st.DrawFn, rows: int) -> list[Cut]:
    """The same for ranks that need not hold as many microbatches as the others, or any at all."""
    kept = draw(st.booleans())
    return [[part for part in rank if part or kept] for rank in draw(assignments(rows))]


@st.composite
def groups_of(
    draw: st.DrawFn, case: Case, *, ranks: int = 4, shuffled: bool = True, padded: bool = True
) -> Groups:
    """The microbatches of each rank: any cut of the case, in any order, and padded anywhere.

    Some of them are empty, some ranks have none, and those of one token may be scalars.
    """
    order = draw(st.permutations(range(case.rows))) if shuffled else range(case.rows)
    scalars, kept = draw(st.booleans()), draw(st.booleans())
    groups: Groups = []
    for own in draw(writings.ranks(order, ranks)):
        groups.append([])
        for part in draw(cuts(len(own))):
            microbatch = taken(case.batch, [own[i] for i in part])
            if padded and draw(st.booleans()):
                rows, columns = draw(st.integers(0, 2)), draw(st.integers(0, 2))
                microbatch = with_noise(case, microbatch, rows, columns)
                groups[-1] += [ignored_like(case, microbatch)] * draw(st.integers(0, 1))
            if scalars and microbatch["w"].numel() == 1:
                microbatch = {key: leaf[0, 0] for key, leaf in microbatch.items()}
            groups[-1] += [microbatch] if kept or part else []
    return groups


def with_noise(case: Case, microbatch: Batch, rows: int, columns: int) -> Batch:
    """The microbatch with ignored rows and columns, in which anything stands."""
    size, length = microbatch["w"].shape
    larger = ignored_like(case, taken(case.batch, [0] * (size + rows)), length + columns)
    for key, leaf in microbatch.items():
        larger[key][:size, :length] = leaf
    return larger


def ignored_like(case: Case, microbatch: Batch, length: int = 0) -> Batch:
    """A microbatch without tokens, in which anything stands."""
    size = (len(microbatch["w"]), length or microbatch["w"].shape[1])
    noise = integer_batch(microbatch["w"].new_zeros(size), case.generator)
    return {key: leaf.to(microbatch[key].dtype) for key, leaf in noise.items()}


Axis = Literal["one", "simulated", "threads"]
AXES: tuple[Axis, ...] = ("one", "simulated", "threads")


class How(NamedTuple):
    """How a step is taken: on which kind of ranks, on pieces or not, and with which settings."""

    axis: Axis
    pieces: bool
    bucket_bytes: int
    settings: dict[str, Any]


@st.composite
def settings_of_steps(draw: st.DrawFn, /, **fixed: Any) -> dict[str, Any]:
    """Keyword arguments of ``make_update_step`` that make no difference; some may be fixed."""
    choices: dict[str, list[Any]] = {
        "normalize": ["loss", "grads"],
        "on_nonfinite": ["propagate", "skip"],
        "donate": [False, True],
        "accum_dtype": [None, torch.float64],
        "grad_and_value": [ps.grad_and_value, torch.func.grad_and_value],
    }
    drawn = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    return {**drawn, **fixed}


@st.composite
def hows(
    draw: st.DrawFn,
    /,
    *,
    axes: Sequence[Axis] = AXES,
    pieces: bool = True,
    **fixed: Any,
) -> How:
    """Any way to take a step: the whole space from which the theorems draw."""
    axis = draw(st.sampled_from(axes))
    settings = draw(settings_of_steps(**fixed))
    spread = pieces and axis == "threads" and draw(st.booleans())
    if spread:
        settings["gather"] = draw(st.sampled_from(["step", "microbatch", "loss"]))
    return How(axis, spread, draw(st.sampled_from([8, 40, 1 << 20])), settings)


Drawn = tuple[Case, How, Groups]


@st.composite
def steps(
    draw: st.DrawFn,
    /,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    fractional: bool = True,
    ranks: int = 4,
    shuffled: bool = True,
    padded: bool = True,
    **how: Any,
) -> Drawn:
    """A case, how a step of it is taken, and the microbatches of each rank."""
    case = draw(cases(dtypes=dtypes, fractional=fractional))
    groups = draw(groups_of(case, ranks=ranks, shuffled=shuffled, padded=padded))
    return case, draw(hows(**how)), groups


def step_of(
    system: Any,
    how: How,
    state: Any,
    groups: Groups,
    loss_fn: Callable[..., Any],
    optimizer: ps.optim.Optimizer,
    weight_fn: Any = weights_of,
) -> Any:
    """``(params, opt_state, metrics)`` of one step in this way, on which all ranks agree."""
    own = tree.map(torch.clone, state) if how.settings.get("donate") else state
    make = partial(system.make_update_step, optimizer=optimizer, weight_fn=weight_fn)
    if how.axis == "one":
        return make(loss_fn, **how.settings)(*own, [part for group in groups for part in group])
    # The host waits for a device where threads meet.
    if how.axis == "simulated" or tree.leaves_of(state)[0].device.type != "cpu":
        axis = ps.VmapAxis(len(groups))
        simulated = axis.map(make(loss_fn, axis=axis, **how.settings), (None, None, 0), None)
        try:
            return simulated(*own, side_by_side(groups))
        except ValueError as error:
            if "differ" not in str(error):
                raise
            raise AssertionError("the ranks end up in different states") from error

    world = ps.testing.ThreadAxis(len(groups), bucket_bytes=how.bucket_bytes)
    gathering = how.settings.get("gather") == "loss"
    step = make(
        (lambda params, batch: loss_fn(ps.unshard(params), batch)) if gathering else loss_fn,
        axis=world,
        **how.settings,
    )

    def rank(group: list[Batch]) -> Any:
        params, opt_state = tree.map(torch.clone, own)
        mine = laid_out(params, LAYOUTS[world.rank % 3]), opt_state
        if not how.pieces:
            return step(*mine, group)
        *new, metrics = step(*ps.shard(mine, world), group)
        return *ps.unshard(tuple(new)), metrics

    parts = [part for group in groups for part in group]
    if gathering and parts:
        empty = {key: torch.zeros_like(leaf) for key, leaf in parts[0].items()}
        most = max(map(len, groups))
        groups = [[*group, *[empty] * (most - len(group))] for group in groups]
    results = world.map(rank)(groups)
    for other in results[1:]:
        first, same = tree.map(torch.nan_to_num, (results[0], other))
        assert_same(same, first, "what a rank returns")
    return results[0]


def check_step(
    system: Any,
    how: How,
    case: Case,
    groups: Groups,
    loss_fn: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
) -> Any:
    """The state is that of ``spec`` on the one big batch, to the bit, and so are the metrics.

    ``loss_fn`` computes what ``plain`` does.
    """
    state = case.params, case.opt_state
    loss_fn = loss_fn or case.loss_fn

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return case.optimizer.update(summed_in(how, grads), opt_state, params)

    expected, grads, loss = spec(plain or loss_fn, update, *state, case.batch)
    *actual, metrics = step_of(system, how, state, groups, loss_fn, case.optimizer)
    assert_same(tuple(actual), expected)
    assert metrics.loss == loss, f"loss: {metrics.loss} is not {loss}"
    assert metrics.loss.dtype == tree.accumulation_dtype(case.batch["x"].dtype)
    assert metrics.num_tokens == case.batch["w"].sum()
    held = sum(bool(part["w"].any()) for group in groups for part in group)
    assert metrics.num_microbatches == held
    assert metrics.applied
    squares = torch.stack([leaf.double().square().sum() for leaf in tree.leaves_of(grads)])
    roundings = gamma(4 * squares.numel() + 64, metrics.grad_norm.dtype)
    assert (metrics.grad_norm - squares.sum().sqrt()).abs() <= roundings * metrics.grad_norm
    return *actual, metrics


def summed_in(how: How, grads: Any) -> Any:
    """Gradients in the dtype in which a step sums them."""
    asked = how.settings.get("accum_dtype")
    return tree.map(lambda g: g.to(asked or tree.accumulation_dtype(g.dtype)), grads)


def side_by_side(groups: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Microbatches with a leading dimension of ranks, smaller ones filled up with zeros."""
    return [
        {
            key: torch.stack(
                [filled(part.get(key), [p[key] for p in parts if p]) for part in parts]
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


def simulate(case: Case, assignment: list[Cut]) -> list[Batch]:
    """``side_by_side`` of an assignment to ranks."""
    return side_by_side([cut(case.batch, rank) for rank in assignment])


def stack(batches: Sequence[Batch]) -> Batch:
    """One batch with a new leading dimension."""
    return {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]}


def assert_same(actual: Any, expected: Any, what: str = "state") -> None:
    """Trees of one structure, with leaves of one dtype, equal to the bit."""
    actual_leaves, actual_structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert actual_structure == expected_structure, f"{what}: another structure"
    for place, (a, b) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        if a.dtype != b.dtype or not torch.equal(a, b):
            path = tree.paths(expected, what)[place]
            raise AssertionError(f"{path}: {a} ({a.dtype}) is not {b} ({b.dtype})")


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of a call: its result, or None and the message with which it refuses."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def capture() -> ps.optim.Optimizer:
    """An optimizer that moves nothing and keeps the gradients that it was given as its state."""
    return ps.optim.Optimizer(
        init=tree.zeros_like,
        update=lambda grads, opt_state, params: (
            params,
            tree.map(lambda grad, kept: grad.to(kept.dtype), grads, opt_state),
        ),
    )


@dataclass(frozen=True, repr=False)
class RealCase:
    """Sequences for the transformer, with the exact gradient of each, scaled as in the equation."""

    params: Any
    batch: Batch
    dtype: torch.dtype
    terms: list[Any]
    losses: Tensor
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
            tree.leaves_of(grads),
            *map(tree.leaves_of, self.terms),
            strict=True,
        ):
            exact = torch.stack(terms)
            bound = gamma(n, self.dtype) * exact.flatten(1).norm(dim=1).sum()
            error = (leaf.to(torch.float64) - exact.sum(0)).norm()
            assert error <= bound, f"{path}: off by {error:.3g}, and rounding explains {bound:.3g}"

    def assert_loss_within_bound(self, loss: Tensor) -> None:
        """The same for the loss."""
        n = models.transformer_roundings(self.dtype) + self.batch["w"].numel()
        error = (loss.to(torch.float64) - self.losses.sum()).abs()
        assert error <= gamma(n, self.dtype) * self.losses.abs().sum()


@st.composite
def real_cases(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype],
    loss_fn: Callable[[Any, Batch], Tensor] = models.transformer_loss,
    make_params: Callable[[torch.Generator, torch.dtype], Any] = models.transformer_params,
    keyed: bool = False,
) -> RealCase:
    """Random text of uneven length, padded, for the transformer in one of the dtypes; ``keyed``: each with a key."""
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    rows = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, models.CONTEXT), min_size=rows, max_size=rows))
    lengths[0] = max(1, lengths[0])
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
    exact = tree.map(lambda leaf: leaf.to(torch.float64), params)

    def loss_of(params: Any, row: int) -> Tensor:
        one = {key: value[row : row + 1] for key, value in batch.items()}
        return loss_fn(params, one).sum() / present.sum()

    terms = [torch.func.grad(loss_of)(exact, row) for row in range(rows)]
    losses = torch.stack([loss_of(exact, row) for row in range(rows)])
    return RealCase(params, batch, dtype, terms, losses, seed)
