"""Adapts pure updates in JAX to trainers. JAX is imported where such a trainer is made."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Capabilities, Group, Observation

JaxUpdate: TypeAlias = Callable[[Any, Any, Sequence[dict[str, Any]], Problem], Any]
"""``update(params, opt_state, microbatches, problem)`` returns params and opt_state.

It may return a mapping of what it reports as a third."""

JaxInit: TypeAlias = Callable[[Any, Problem], Any]
"""``init(params, problem)`` returns an optimizer state."""

ROWS = (4, 32, 4096)
LENGTHS = (4, 32)
"""Sizes to which microbatches are padded. The largest hold all that the kit draws: 2,049 rows, each
a token of many that are repeated, and 28 tokens in a row."""


def jax_loop(
    update: JaxUpdate,
    init: JaxInit | None = None,
    capabilities: Capabilities = Capabilities(dtype=torch.float32),
    *,
    rows: Sequence[int] = ROWS,
    lengths: Sequence[int] = LENGTHS,
) -> "JaxTrainer":
    """Makes a trainer of a pure update in JAX, which may be jitted in part or as a whole.

    JAX compiles once for each shape. So all microbatches of an update are padded at the end to the
    same sizes: the smallest of ``rows`` and of ``lengths`` that hold them. What is added has weight
    0. The numbers of the problem differ from case to case: pass them to what is jitted.

    Raises ``ValueError`` for several ranks, for a task that has a model of torch's, and for float64
    unless ``jax_enable_x64`` is set. The trainer's ``update`` raises it for a microbatch that is
    larger than all sizes.

    Args:
        update: ``update(params, opt_state, microbatches, problem)`` returns new params and state,
            and perhaps a mapping of numbers that it reports, by their names in ``Observation``,
            such as "loss". Params and microbatches are dicts of arrays.
        init: ``init(params, problem)`` returns the optimizer state; None: the state is None.
        capabilities: of the trainer. JAX computes in float32 unless it is configured otherwise.
        rows: sizes for the number of rows.
        lengths: sizes for the number of tokens in a row.

    >>> import jax
    >>> @jax.jit
    ... def grad_of_sum(params, batch):
    ...     def loss_sum(params):
    ...         errors = batch["x"] @ params["weight"] + params["bias"] - batch["y"]
    ...         return (batch["w"] * errors**2).sum()
    ...     return jax.grad(loss_sum)(params)
    >>> def update(params, opt_state, microbatches, problem):
    ...     count = sum(batch["w"].sum() for batch in microbatches)
    ...     if count == 0:
    ...         return params, opt_state
    ...     grads = [grad_of_sum(params, batch) for batch in microbatches]
    ...     step = lambda p, *g: p - problem.learning_rate * sum(g) / count
    ...     return jax.tree.map(step, params, *grads), opt_state
    >>> plain = Capabilities(dtype=torch.float32, momentum=False)
    >>> from purestep.testing import check
    >>> check(jax_loop(update, capabilities=plain), ["T0", "T1"], cases=8)
    """
    import jax

    if capabilities.ranks != 1:
        raise ValueError(f"jax_loop runs a single rank, but {capabilities.ranks=}")
    if capabilities.task.model is not None:
        raise ValueError(
            f"jax_loop cannot train the model of the task {capabilities.task.name!r}, which is "
            "torch's: take ps.testing.REGRESSION"
        )
    if capabilities.dtype == torch.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "JAX computes in float32: declare Capabilities(dtype=torch.float32), or set "
            "jax.config.update('jax_enable_x64', True)"
        )
    return JaxTrainer(update, init, capabilities, rows, lengths)


class JaxTrainer:
    """Trains by a pure update in JAX, as ``jax_loop`` describes it. It can be saved and loaded."""

    def __init__(
        self,
        update: JaxUpdate,
        init: JaxInit | None,
        capabilities: Capabilities,
        rows: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        self.capabilities = capabilities
        self._update = update
        self._init = init
        self._rows = rows
        self._lengths = lengths

    def start(self, problem: Problem, ranks: int) -> None:
        """Makes new arrays of the problem's parameters, and an optimizer state by ``init``.

        Without ``init`` the state is None. ``ranks`` makes no difference: there is one.
        """
        self._problem = problem
        self._params = _to_arrays(problem.params())
        self._opt_state = None
        if self._init is not None:
            self._opt_state = self._init(self._params, problem)
        self._reported: Mapping[str, Any] = {}

    def update(self, group: Group) -> None:
        """Pads the microbatches of the only rank, and calls the pure update on them.

        Its results replace params and state. What the pure update reports, if anything, is kept for
        ``observe``. Raises ``ValueError`` for a microbatch that is larger than all sizes.
        """
        (microbatches,) = group
        padded = self._pad(microbatches)
        arrays = [_to_arrays(batch) for batch in padded]
        result = self._update(self._params, self._opt_state, arrays, self._problem)
        self._params, self._opt_state, *reported = result
        self._reported = reported[0] if reported else {}

    def observe(self) -> Sequence[Observation]:
        """Returns one observation: the params, copied to tensors, and the last update's reports.

        These are floats, or None. Raises ``TypeError`` for a report that ``Observation`` has no
        field for, and for one that is no single number, such as "averages".
        """
        params = {name: _to_tensor(p) for name, p in self._params.items()}
        reported = {
            name: None if value is None else float(value)
            for name, value in self._reported.items()
        }
        return [Observation(params, **reported)]

    def save(self) -> Any:
        """Returns copies of params and state: a jitted function may later donate the originals."""
        return copy.deepcopy((self._params, self._opt_state))

    def load(self, saved: Any) -> None:
        """Puts copies of a saved state in place, so that the saved one can be loaded again."""
        self._params, self._opt_state = copy.deepcopy(saved)

    def _pad(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """Returns copies of the microbatches, padded to one of the trainer's sizes for all of them.

        That is the smallest number of rows, and of tokens in a row, that holds the largest
        microbatch. Padding has weight 0. Raises ``ValueError`` if no size is large enough.
        """
        if not microbatches:
            return []
        task = self._problem.task
        shapes = [task.weights(batch).shape for batch in microbatches]
        num_rows = _fit_size(max(shape[0] for shape in shapes), self._rows, "rows")
        length = _fit_size(max(shape[1] for shape in shapes), self._lengths, "lengths")
        padded = []
        for batch in microbatches:
            larger = {}
            for key, x in batch.items():
                sizes = [num_rows, length][
                    : x.ndim
                ]  # "key" has one number for each row.
                larger[key] = _enlarge(x, sizes, task.ignored[key])
            padded.append(larger)
        return padded


def _fit_size(number: int, sizes: Sequence[int], name: str) -> int:
    """Returns the smallest size that is not below the number; raises ``ValueError`` without one."""
    fitting = [size for size in sizes if size >= number]
    if not fitting:
        raise ValueError(f"a microbatch has {number} {name}: jax_loop({name}={sizes})")
    return min(fitting)


def _enlarge(x: Tensor, sizes: Sequence[int], fill: float) -> Tensor:
    """Returns a copy whose first dimensions are lengthened to ``sizes``, by ``fill`` at the end."""
    larger = x.new_full([*sizes, *x.shape[len(sizes) :]], fill)
    region = tuple(slice(0, size) for size in x.shape)
    larger[region] = x
    return larger


def _to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copies tensors to arrays of JAX, by name.

    JAX turns float64 and int64 into 32 bits unless it is configured otherwise.
    """
    from jax import numpy as jnp

    arrays = {}
    for name, x in tensors.items():
        if x.dtype == torch.bfloat16:
            # NumPy has no such dtype.
            arrays[name] = jnp.array(x.float().numpy(), jnp.bfloat16)
        else:
            arrays[name] = jnp.array(x.numpy())
    return arrays


def _to_tensor(array: Any) -> Tensor:
    """Copies an array of JAX to a tensor on the host, of the same dtype."""
    import numpy

    if array.dtype.name == "bfloat16":
        wide = numpy.asarray(array, numpy.float32)
        return torch.tensor(wide).to(torch.bfloat16)
    return torch.tensor(numpy.asarray(array))
