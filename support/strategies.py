"""Draws cases for the theorems: data, cuts, ranks and settings; and compares results.

There are two strengths of equality.

**Exact**: integers in float64 and N a power of two make every operation exact, so the claim is bitwise.
**Bounded**: for real models, the a-priori bound γₙ Σ‖gₘ‖ of floating point summation, with
γₙ = n u / (1 − n u), u the unit roundoff of the dtype, n the roundings in a row, gₘ the exact
gradient of sequence m. Nothing is tuned. (``support/texts.py`` draws those cases.)

Hypothesis draws one number, from which a ``Chooser`` makes the case: all choices are equally
likely. (Hypothesis itself repeats itself: of its groups, two of three were one microbatch.)
"""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing.bounds import rounding_bound
from support import models
from support.optimizers import (
    EXACT,
    OPTIMIZERS,
    RECIPES as RECIPES,
    label_leaves as label_leaves,
    mask_matrices as mask_matrices,
)

# As many as reject each mutant.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

Batch = dict[str, Tensor]
Cut = list[list[int]]
"""The rows of each microbatch, in order."""
Groups = list[list[Batch]]
"""The microbatches of each rank."""
T = TypeVar("T")


class Chooser(random.Random):
    """Chooses evenly, from one number. Small numbers make small cases, to which a failure shrinks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.max_size = min(6, 1 + number.bit_length() // 2)

    def maybe(self) -> bool:
        """Chooses yes or no."""
        return self.random() < 0.5

    def generator(self) -> torch.Generator:
        """Returns a seeded source of tensors."""
        return torch.Generator().manual_seed(self.randrange(2**20))


@st.composite
def builds(draw: st.DrawFn, make: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Draws a ``Chooser`` and returns ``make(choose, *args, **kwargs)``."""
    choose = Chooser(draw(st.integers(0, 2**20)))
    return make(choose, *args, **kwargs)


def get_weights(batch: Batch) -> Tensor:
    """Returns the batch's weights."""
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
        """Looks up the optimizer by its name."""
        return OPTIMIZERS[self.recipe]

    @property
    def loss_fn(self) -> Callable[[Any, Batch], Tensor]:
        """Returns a loss of which nothing rounds in the dtype of the params."""
        if self.batch["x"].dtype.itemsize < 4:
            return models.linear_loss
        return models.integer_loss

    def __repr__(self) -> str:
        weights = self.batch["w"]
        return f"Case(seed={self.seed}, w={weights}, opt_state={self.opt_state})"

    @property
    def rows(self) -> int:
        """Counts the sequences."""
        return len(self.batch["w"])

    @property
    def generator(self) -> torch.Generator:
        """Returns fresh noise, the same every time."""
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
"""Dtypes of targets, in addition to those of the params."""
LAYOUTS = ["rows", "columns", "gaps", "one buffer", "one tensor"]
"""How leaves may lie in memory."""


def make_case(
    choose: Chooser,
    *,
    fractional: bool = True,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    trees: bool = False,
    keyed: bool = False,
) -> Case:
    """Makes integer data and parameters; many weights are 0, and their sum is a power of two.

    ``trees``: params are no bare tensor. ``keyed``: rows have keys, for attention with dropout.
    """
    seed = choose.randrange(2**20)
    generator = torch.Generator().manual_seed(seed)
    rows = choose.randint(1, choose.max_size)
    length = choose.randint(1, min(4, choose.max_size))
    recipe = choose_recipe(choose, dtypes, keyed=keyed)
    weight_dtypes = [
        dtype for dtype in WEIGHTS if fractional or not dtype.is_floating_point
    ]
    weight_dtype = choose.choice(weight_dtypes)
    dtype = choose.choice(dtypes if recipe in EXACT else [torch.float64])

    weights = make_weights(choose, rows * length, weight_dtype).view(rows, length)
    batch = make_integer_batch(weights, generator)
    batch["x"] = batch["x"].to(dtype)
    batch["y"] = batch["y"].to(dtype)
    if choose.maybe():
        batch["y"] = batch["y"].abs().to(choose.choice(TARGETS))
    if keyed:
        batch["key"] = make_keys(seed, rows)

    params: Any = models.integer_params(generator)
    if choose.maybe():
        params["unused"] = models.integers((3,), generator)
    elif not (trees or keyed or choose.randrange(4)):
        params = models.flatten_params(params)
    params = tree.map(lambda leaf: leaf.to(dtype), params)
    params = change_layout(params, choose.choice(LAYOUTS))
    opt_state = make_opt_state(recipe, params, generator)
    opt_state = change_layout(opt_state, choose.choice(LAYOUTS[:3]))
    # Trees are the same whatever the order of their keys, and need not have it in common.
    if choose.maybe():
        params = reverse_keys(params)
    if choose.maybe():
        opt_state = reverse_keys(opt_state)
    return Case(params, batch, recipe, opt_state, seed)


def choose_recipe(
    choose: Chooser, dtypes: Sequence[torch.dtype], *, keyed: bool
) -> str:
    """Chooses an optimizer that is exact in one of the dtypes."""
    names = [name for name in OPTIMIZERS if torch.float64 in dtypes or name in EXACT]
    if keyed:
        # Squares of attention's gradients do not add up exactly.
        names = [name for name in names if name != "clipped"]
    return choose.choice(names)


def make_keys(seed: int, rows: int) -> Tensor:
    """Makes a random key for each row."""
    return ps.random.fold_in(ps.random.key(seed), torch.arange(rows))


def make_weights(choose: Chooser, size: int, dtype: torch.dtype) -> Tensor:
    """Makes a weight for each token, often 0, so that their sum is a power of two."""
    number = choose.choice([1, 2, 4, 8, 16, 16])
    if dtype == torch.bool:
        largest_power = 1 << (size.bit_length() - 1)
        tokens = choose.sample(range(size), min(number, largest_power))
    else:
        tokens = choose.choices(range(size), k=number)
    weights = torch.bincount(torch.tensor(tokens), minlength=size).to(dtype)
    if dtype == torch.float64:
        weights = weights / choose.choice([1, 16, 256])
    return weights


def reverse_keys(state: Any) -> Any:
    """Returns the same tree, the keys of its dicts in the opposite order."""
    if isinstance(state, Tensor):
        return state
    if isinstance(state, dict):
        return {key: reverse_keys(state[key]) for key in reversed(state)}
    children = [reverse_keys(child) for child in state]
    if hasattr(state, "_fields"):
        return type(state)(*children)
    return type(state)(children)


def change_layout(params: Any, layout: str) -> Any:
    """Lays leaves out in memory in one of the ``LAYOUTS``.

    Columns follow one another, elements have gaps between them, or leaves are parts of one buffer.
    For ``"one tensor"``, the first hidden bias of a dict replaces the second. ``"rows"`` changes
    nothing.
    """
    if layout == "columns":
        return tree.map(store_by_columns, params)
    if layout == "gaps":
        return tree.map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0], params)
    if layout == "one buffer":
        return share_buffer(params)
    if layout == "one tensor" and isinstance(params, dict):
        bias = params["hidden"]["biases"][0]
        hidden = {**params["hidden"], "biases": [bias, bias]}
        return {**params, "hidden": hidden}
    return params


def store_by_columns(leaf: Tensor) -> Tensor:
    """Returns a matrix in column-major order, and any other tensor itself."""
    return leaf.T.contiguous().T if leaf.ndim == 2 else leaf


def share_buffer(params: Any) -> Any:
    """Copies all leaves into views of one buffer."""
    leaves, structure = tree.flatten(params)
    buffer = torch.cat([leaf.reshape(-1) for leaf in leaves])
    parts = buffer.split([leaf.numel() for leaf in leaves])
    views = [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
    return tree.unflatten(structure, views)


def copy_state(state: Any) -> Any:
    """Copies a state that a step may consume, strides included."""
    return tree.map(copy_with_strides, state)


def copy_with_strides(leaf: Tensor) -> Tensor:
    """Copies a tensor, strides included; lazy tensors have none."""
    if leaf.device.type == "lazy":
        return leaf.clone()
    copy = torch.empty_strided(
        leaf.shape,
        leaf.stride(),
        dtype=leaf.dtype,
        device=leaf.device,
    )
    return copy.copy_(leaf)


def make_opt_state(recipe: str, params: Any, generator: torch.Generator) -> Any:
    """Makes a state of small integers, as if training had gone on for a while."""

    def small_integers(leaf: Tensor) -> Tensor:
        values = torch.randint(0, 4, leaf.shape, generator=generator)
        return values.to(leaf.dtype)

    return tree.map(small_integers, OPTIMIZERS[recipe].init(params))


def make_integer_batch(weights: Tensor, generator: torch.Generator) -> Batch:
    """Makes integer inputs and targets for these weights."""
    rows, length = weights.shape
    return {
        "x": models.integers((rows, length, models.FEATURES), generator),
        "y": models.integers((rows, length), generator),
        "w": weights,
    }


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Selects rows of a batch."""
    return {key: value[list(rows)] for key, value in batch.items()}


def cut_batch(batch: Batch, microbatches: Cut) -> list[Batch]:
    """Cuts a batch into microbatches."""
    return [select_rows(batch, rows) for rows in microbatches]


def make_cut(
    choose: Chooser, rows: Sequence[int], numbers: range, *, empty: bool = True
) -> Cut:
    """Cuts the rows into some number of microbatches; without ``empty`` ones, into no more than there are rows."""
    number = choose.choice(numbers)
    if empty:
        ends = sorted(choose.choices(range(len(rows) + 1), k=number - 1))
    else:
        number = min(number, len(rows))
        ends = sorted(choose.sample(range(1, len(rows)), number - 1))
    return [[*rows[a:b]] for a, b in itertools.pairwise([0, *ends, len(rows)])]


RANKS = (1, 2, 3, 4)


def make_shares(
    choose: Chooser, rows: int, *, ranks: Sequence[int] = RANKS, shuffled: bool = True
) -> list[Cut]:
    """Deals rows to the microbatches of ranks: one rank has two to nine, of several some have none."""
    order = choose.sample(range(rows), rows)
    size = choose.choice(ranks)
    owners = [choose.randrange(size) for _ in order]
    numbers = range(2, choose.max_size + 4) if size == 1 else range(1, 5)
    empty = rows == 1 or choose.maybe()
    shares: list[Cut] = []
    for rank in range(size):
        local = [row for row, owner in zip(order, owners, strict=True) if owner == rank]
        if not local and (not empty or choose.maybe()):
            shares.append([])
            continue
        if not shuffled:
            local.sort()
        shares.append(make_cut(choose, local, numbers, empty=empty))
    return shares


def make_groups(
    choose: Chooser,
    case: Case,
    *,
    padded: bool = True,
    scalars: bool = True,
    **of_shares: Any,
) -> Groups:
    """Makes the microbatches of each rank: any cut of the case, in any order, padded at the ends.

    Some of them are empty, some ranks have none, and those of one token may be scalars.
    """
    scalars = scalars and "key" not in case.batch and choose.maybe()
    groups: Groups = []
    for share in make_shares(choose, case.rows, **of_shares):
        group: list[Batch] = []
        for microbatch in cut_batch(case.batch, share):
            if padded and choose.maybe():
                rows = choose.randrange(3)
                columns = choose.randrange(3)
                microbatch = pad_with_noise(case, microbatch, rows, columns)
                if choose.maybe():
                    group.append(make_ignored(case, microbatch))
            if scalars and microbatch["w"].numel() == 1:
                microbatch = {key: leaf[0, 0] for key, leaf in microbatch.items()}
            group.append(microbatch)
        groups.append(group)
    return groups


def pad_with_noise(case: Case, microbatch: Batch, rows: int, columns: int) -> Batch:
    """Adds ignored rows and columns of arbitrary values to a microbatch."""
    size, length = microbatch["w"].shape
    template = select_rows(case.batch, [0] * (size + rows))
    larger = make_ignored(case, template, length + columns)
    for key, leaf in microbatch.items():
        larger[key][corner_of(leaf.shape)] = leaf
    return larger


def corner_of(shape: torch.Size) -> tuple[slice, ...]:
    """Returns the index of a corner of this shape in a larger tensor."""
    return tuple(slice(size) for size in shape)


def make_ignored(case: Case, microbatch: Batch, length: int = 0) -> Batch:
    """Makes a microbatch of arbitrary values without tokens."""
    weights = microbatch["w"]
    size = (len(weights), length or weights.shape[1])
    noise = make_integer_batch(weights.new_zeros(size), case.generator)
    noise["key"] = torch.arange(len(weights))
    return {key: noise[key].to(leaf.dtype) for key, leaf in microbatch.items()}


Axis = Literal["one", "simulated", "threads"]
AXES: tuple[Axis, ...] = ("one", "simulated", "threads")
GATHERS = ["step", "microbatch", "loss", "loss, recomputed"]
"""Where a gather may stand; a loss that is computed again gathers twice."""
BRIDGES = ["", "", "", "eager", "compiled"]
"""How ``make_backward`` runs a loss, where it does. It compiles on a single rank, which takes long."""
GRIDS = [(0, 1), (1, 2), (2, 2)]
"""Rows and columns of a mesh; no rows: the mesh has one dimension."""


class Setup(NamedTuple):
    """Says how a step is taken: on which ranks, on full params or shards, and with which settings.

    Shards are cut over an axis of ranks, or over the rows of a grid, and padded to a multiple of ranks.
    If ``stacks``, a group whose microbatches have equal shapes comes in one tree. If ``bridge`` is not
    empty, the gradients are those that ``make_backward`` sets, where it can.
    """

    axis: Axis
    settings: dict[str, Any]
    gather: str = ""
    grid: tuple[int, int] = (0, 1)
    bucket_bytes: int = 40
    stacks: bool = False
    bridge: str = ""

    def with_settings(self, **settings: Any) -> "Setup":
        """Replaces some settings."""
        return self._replace(settings={**self.settings, **settings})


SETTINGS: dict[str, list[Any]] = {
    "normalize": ["loss", "grads"],
    "on_nonfinite": ["propagate", "skip"],
    "donate": [False, True],
    "accum_dtype": [None, torch.float64, torch.float32],
    "grad_and_value": [ps.grad_and_value, torch.func.grad_and_value],
}


def choose_settings(choose: Chooser, **fixed: Any) -> dict[str, Any]:
    """Chooses keyword arguments of ``make_update_step`` that make no difference; some may be fixed."""
    settings = {name: choose.choice(values) for name, values in SETTINGS.items()}
    return {**settings, **fixed}


def choose_setup(
    choose: Chooser,
    *,
    axes: Sequence[Axis] = AXES,
    gathers: Sequence[str] = ("", "", "", *GATHERS),
    grids: Sequence[tuple[int, int]] = GRIDS,
    bridges: Sequence[str] = ("", "", "", "eager"),
    **fixed: Any,
) -> Setup:
    """Chooses how to take a step, from the whole space that the theorems cover."""
    axis = choose.choice(axes)
    settings = choose_settings(choose, **fixed)
    gather = choose.choice(gathers) if axis != "one" else ""
    grid = choose.choice(grids) if axis == "threads" and gather else (0, 1)
    bucket_bytes = choose.choice([8, 40, 1 << 20])
    stacks = choose.choice([False, True])
    bridge = choose.choice(bridges)
    return Setup(axis, settings, gather, grid, bucket_bytes, stacks, bridge)


StepCase = tuple[Case, Setup, Groups]


def make_step_case(
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
    **of_setup: Any,
) -> StepCase:
    """Makes a case, chooses how a step of it is taken, and makes the microbatches of each rank."""
    case = make_case(
        choose,
        dtypes=dtypes,
        fractional=fractional,
        trees=trees,
        keyed=keyed,
    )
    if keyed:
        # Gradients of attention are not exact in float32.
        of_setup["accum_dtype"] = None
    setup = choose_setup(choose, **of_setup)
    groups = make_groups(
        choose,
        case,
        ranks=ranks,
        shuffled=shuffled,
        padded=padded,
        scalars=scalars,
    )
    return case, setup, groups


def steps(**narrowed: Any) -> st.SearchStrategy[StepCase]:
    """Draws cases of steps; keywords of ``make_step_case`` narrow them."""
    return builds(make_step_case, **narrowed)


def stack_ranks(groups: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Stacks the ranks' microbatches along a leading dimension, smaller ones padded with zeros."""
    stacked = []
    for parts in itertools.zip_longest(*groups, fillvalue={}):
        present = [part for part in parts if part]
        batch = {}
        for key in present[0]:
            largest = largest_zeros([part[key] for part in present])
            leaves = [fill_corner(largest, part.get(key)) for part in parts]
            batch[key] = torch.stack(leaves)
        stacked.append(batch)
    return stacked


def largest_zeros(leaves: list[Tensor]) -> Tensor:
    """Makes zeros in the smallest shape that holds each of the leaves."""
    ndim = max(leaf.ndim for leaf in leaves)
    shapes = [(1,) * (ndim - leaf.ndim) + leaf.shape for leaf in leaves]
    return leaves[0].new_zeros([max(sizes) for sizes in zip(*shapes, strict=True)])


def fill_corner(zeros: Tensor, leaf: Tensor | None) -> Tensor:
    """Copies zeros, with a leaf in their corner."""
    filled = zeros.clone()
    if leaf is not None:
        corner = (0,) * (zeros.ndim - leaf.ndim) + corner_of(leaf.shape)
        filled[corner] = leaf
    return filled


def stack_trees(trees: Sequence[Any]) -> Any:
    """Stacks trees into one, whose leaves have a new dimension in front."""
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def assert_same(actual: Any, expected: Any, what: str = "state") -> None:
    """Asserts that trees have one structure, and leaves one dtype and equal values, and no NaN."""
    actual_leaves, actual_structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert actual_structure == expected_structure, f"{what}: another structure"
    pairs = zip(actual_leaves, expected_leaves, strict=True)
    for number, (a, b) in enumerate(pairs):
        if a.dtype != b.dtype or not torch.equal(a, b):
            path = tree.paths(expected, what)[number]
            raise AssertionError(f"{path}: {a} ({a.dtype}) is not {b} ({b.dtype})")


def assert_near(actual: Any, expected: Any, before: Any, roundings: int = 0) -> None:
    """Asserts that each leaf is off by no more than roundings of its old value and of its move.

    A step has norms over all elements, and a formula with its powers of β.
    """
    elements = sum(leaf.numel() for leaf in tree.leaves(before[0]))
    bound = rounding_bound(2 * (elements + 64) + roundings, torch.float64)
    for path, actual_leaf, expected_leaf, old_leaf in zip(
        tree.paths(before, "state"),
        tree.leaves(actual),
        tree.leaves(expected),
        tree.leaves(before),
        strict=True,
    ):
        old = old_leaf.to(torch.float64)
        target = expected_leaf.to(torch.float64)
        error = (actual_leaf.to(torch.float64) - target).abs()
        scale = old.abs() + (target - old).abs()
        assert (error <= bound * scale).all(), f"{path}: off by {error}"


def try_call(call: Callable[[], Any]) -> tuple[Any, str]:
    """Calls; returns the result and "", or None and the message of a ValueError or AssertionError.

    The message includes that of the cause, such as a rank's error. Other errors are raised.
    """
    try:
        return call(), ""
    except (ValueError, AssertionError) as error:
        return None, f"{error}: {error.__cause__}"
