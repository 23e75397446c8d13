"""optax in JAX: ``MultiSteps``, and ``microbatch``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.conformance.column import Column
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Abilities, Group, Observation


def _arrays(batch: Batch) -> Any:
    import numpy as np
    from jax import numpy as jnp

    return {key: jnp.asarray(np.asarray(value), jnp.float32) for key, value in batch.items()}


def loss_sum(params: Any, batch: Any) -> Any:
    """Of the kit's linear model."""
    predictions = batch["x"] @ params["weight"] + params["bias"]
    return (batch["w"] * (predictions - batch["y"]) ** 2).sum()


def mean_loss(params: Any, batch: Any) -> Any:
    """The mean over what counts."""
    return loss_sum(params, batch) / batch["w"].sum()


def sgd(problem: Problem) -> Any:
    """The problem's numbers, in optax."""
    import optax

    momentum = problem.momentum or None
    plain = optax.sgd(problem.learning_rate, momentum)
    return optax.chain(optax.add_decayed_weights(problem.weight_decay), plain)


class Jax:
    """A state of arrays, in float32, which JAX computes in unless told otherwise. Nothing is jitted: the cases are small."""

    abilities = Abilities(dtype=torch.float32)

    def __init__(self, step: Callable[[Problem, Any, Any, list[Any]], Any]) -> None:
        self._step = step

    def start(self, problem: Problem, ranks: int) -> None:
        """At the problem's own parameters."""
        self.problem = problem
        self.params = _arrays(problem.params())
        self.opt_state: Any = sgd(problem).init(self.params)

    def update(self, group: Group) -> None:
        """One update."""
        import jax

        (microbatches,) = group
        with jax.disable_jit():
            self.params, self.opt_state = self._step(
                self.problem,
                self.params,
                self.opt_state,
                [_arrays(batch) for batch in microbatches],
            )

    def observe(self) -> Sequence[Observation]:
        """The parameters, as torch's."""
        import numpy as np

        params = {name: torch.tensor(np.asarray(p)) for name, p in self.params.items()}
        return [Observation(params)]

    def save(self) -> Any:
        """Both are values."""
        return self.params, self.opt_state

    def load(self, saved: Any) -> None:
        """Both are values."""
        self.params, self.opt_state = saved


def multi_steps(problem: Problem, params: Any, opt_state: Any, batches: list[Any]) -> Any:
    """``optax.MultiSteps`` over the group, on the mean loss of each microbatch; the inner state is kept from group to group."""
    import jax
    import optax

    if not batches:
        return params, opt_state
    optimizer = optax.MultiSteps(sgd(problem), every_k_schedule=len(batches))
    state = optimizer.init(params)._replace(inner_opt_state=opt_state)
    for batch in batches:
        grads = jax.grad(mean_loss)(params, batch)
        updates, state = optimizer.update(grads, state, params=params)
        params = optax.apply_updates(params, updates)
    return params, state.inner_opt_state


def multi_steps_sums(problem: Problem, params: Any, opt_state: Any, batches: list[Any]) -> Any:
    """``use_grad_mean=False``, on sums over the group's count; no step where nothing counts."""
    import jax
    import optax

    num_tokens = sum(batch["w"].sum() for batch in batches)
    if not num_tokens:
        return params, opt_state
    optimizer = optax.MultiSteps(sgd(problem), every_k_schedule=len(batches), use_grad_mean=False)
    state = optimizer.init(params)._replace(inner_opt_state=opt_state)
    for batch in batches:
        grads = jax.grad(lambda params, batch: loss_sum(params, batch) / num_tokens)(params, batch)
        updates, state = optimizer.update(grads, state, params=params)
        params = optax.apply_updates(params, updates)
    return params, state.inner_opt_state


def whole(batches: list[Any]) -> Any:
    """``microbatch`` cuts one batch itself, into equal parts: the microbatches as one batch, and as many tokens in each row."""
    from jax import numpy as jnp

    return {key: jnp.concatenate([batch[key] for batch in batches]) for key in batches[0]}


class Microbatch(Jax):
    """``optax.microbatching.microbatch`` of a gradient: of the whole group as one batch, in parts of a size that is a setting."""

    settings = ("microbatch_size=1", "microbatch_size=None")

    def __init__(self, function: Any, accumulator: str, divide: bool) -> None:
        super().__init__(self._one)
        self._function, self._accumulator, self._divide = function, accumulator, divide
        self._setting = self.settings[1]

    def use(self, setting: str) -> None:
        """How it cuts."""
        self._setting = setting

    def _one(self, problem: Problem, params: Any, opt_state: Any, batches: list[Any]) -> Any:
        import jax
        import optax

        if not batches:
            return params, opt_state
        accumulators: Any = optax.microbatching.AccumulationType
        grad = optax.microbatching.microbatch(
            jax.grad(self._function),
            argnums=1,
            microbatch_size=1 if self._setting == self.settings[0] else None,
            accumulator=getattr(accumulators, self._accumulator),
        )
        batch = whole(_same_length(batches))
        num_tokens = batch["w"].sum()
        if self._divide and not num_tokens:
            return params, opt_state
        grads = grad(params, batch)
        if self._divide:
            grads = jax.tree.map(lambda g: g / num_tokens, grads)
        updates, opt_state = sgd(problem).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def _same_length(batches: list[Any]) -> list[Any]:
    from jax import numpy as jnp

    longest = max(batch["w"].shape[1] for batch in batches)

    def longer(x: Any) -> Any:
        more = [(0, 0), (0, longest - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, more)

    return [{key: longer(x) for key, x in batch.items()} for batch in batches]


PACKAGES = ("optax", "jax")
COLUMNS = [
    Column(
        "optax.MultiSteps",
        lambda: Jax(multi_steps),
        PACKAGES,
        "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html, and the docstring",
        "“use_grad_mean: if ``True`` (the default), gradients accumulated over multiple mini-steps are averaged. Otherwise, they "
        "are summed.” The loss is the mean over a mini-batch, as in the example.",
    ),
    Column(
        "optax.MultiSteps, sums",
        lambda: Jax(multi_steps_sums),
        PACKAGES,
        "the docstring of optax.MultiSteps",
        "use_grad_mean=False, and each microbatch's sum over the count of the group; no step where nothing counts.",
        documented=False,
    ),
    Column(
        "optax.microbatch, MEAN",
        lambda: Microbatch(mean_loss, "MEAN", divide=False),
        PACKAGES,
        "the docstring of optax.microbatching.microbatch",
        "“this transformation requires knowledge of how the individual microbatch results should be combined back together (SUM, MEAN, "
        "or CONCAT)”: MEAN of the gradients of mean losses, in microbatches of one row.",
    ),
    Column(
        "optax.microbatch, SUM",
        lambda: Microbatch(loss_sum, "SUM", divide=True),
        PACKAGES,
        "the docstring of optax.microbatching.microbatch",
        "SUM of the gradients of sums, divided once by the count; no step where nothing counts.",
    ),
]
