"""optax in JAX: ``MultiSteps``, and ``microbatch``."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.trainers.column import Column
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Capabilities, Group, Observation


def _arrays(batch: Batch) -> Any:
    import numpy as np
    from jax import numpy as jnp

    return {
        key: jnp.asarray(np.asarray(value), jnp.float32) for key, value in batch.items()
    }


def loss_sum(params: Any, batch: Any) -> Any:
    """Of the kit's linear model."""
    predictions = batch["x"] @ params["weight"] + params["bias"]
    return (batch["w"] * (predictions - batch["y"]) ** 2).sum()


def mean_loss(params: Any, batch: Any) -> Any:
    """``jnp.mean`` over what counts. Where nothing does, it is no number, and its gradient is zero."""
    from jax import numpy as jnp

    predictions = batch["x"] @ params["weight"] + params["bias"]
    return jnp.mean((predictions - batch["y"]) ** 2, where=batch["w"] > 0)


def sgd(problem: Problem) -> Any:
    """The problem's numbers, in optax."""
    import optax

    momentum = problem.momentum or None
    plain = optax.sgd(problem.learning_rate, momentum)
    return optax.chain(optax.add_decayed_weights(problem.weight_decay), plain)


MASK = Capabilities(weights="mask", dtype=torch.float32)
ANY = Capabilities(dtype=torch.float32)


class Jax:
    """A state of arrays, in float32, which JAX computes in unless told otherwise. Nothing is jitted: the cases are small."""

    def __init__(
        self,
        step: Callable[[Problem, Any, Any, list[Any]], Any],
        capabilities: Capabilities,
    ) -> None:
        self._step, self.capabilities = step, capabilities

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


class MultiSteps(Jax):
    """``optax.MultiSteps`` over each group; the inner state is kept from group to group.

    The last mini-step of a group is put off until somebody looks, so that what is saved is in the middle of an accumulation.
    """

    def __init__(self, sums: bool = False) -> None:
        super().__init__(self._one, ANY if sums else MASK)
        self._sums = sums

    def start(self, problem: Problem, ranks: int) -> None:
        """Nothing is put off."""
        super().start(problem, ranks)
        self._pending: Any = None

    def _one(
        self, problem: Problem, params: Any, opt_state: Any, batches: list[Any]
    ) -> Any:
        import optax

        self._finish()
        num_tokens = sum(batch["w"].sum() for batch in batches)
        if not batches or (self._sums and not num_tokens):
            return self.params, self.opt_state
        steps = optax.MultiSteps(
            sgd(problem), every_k_schedule=len(batches), use_grad_mean=not self._sums
        )
        state = steps.init(self.params)._replace(inner_opt_state=self.opt_state)
        for batch in batches[:-1]:
            self.params, state = self._mini(
                self.params, state, batch, len(batches), num_tokens
            )
        self._pending = state, batches[-1], len(batches), num_tokens
        return self.params, self.opt_state

    def _mini(
        self, params: Any, state: Any, batch: Any, number: int, num_tokens: Any
    ) -> Any:
        import jax
        import optax

        def of_sums(params: Any, batch: Any) -> Any:
            return loss_sum(params, batch) / num_tokens

        steps = optax.MultiSteps(
            sgd(self.problem), every_k_schedule=number, use_grad_mean=not self._sums
        )
        grads = jax.grad(of_sums if self._sums else mean_loss)(params, batch)
        updates, state = steps.update(grads, state, params=params)
        return optax.apply_updates(params, updates), state

    def _finish(self) -> None:
        import jax

        if self._pending is not None:
            with jax.disable_jit():
                self.params, state = self._mini(self.params, *self._pending)
            self.opt_state, self._pending = state.inner_opt_state, None

    def observe(self) -> Sequence[Observation]:
        """After the last mini-step."""
        self._finish()
        return super().observe()

    def save(self) -> Any:
        """As bytes: with the accumulator, and the batch that is still to come."""
        import jax
        import numpy as np

        return pickle.dumps(
            jax.tree.map(np.asarray, (self.params, self.opt_state, self._pending))
        )

    def load(self, saved: Any) -> None:
        """In the middle of an accumulation, where it was."""
        import jax
        from jax import numpy as jnp

        self.params, self.opt_state, pending = jax.tree.map(
            jnp.asarray, pickle.loads(saved)
        )
        self._pending = pending and (
            pending[0],
            pending[1],
            int(pending[2]),
            pending[3],
        )


def whole(batches: list[Any]) -> Any:
    """``microbatch`` cuts one batch itself, into equal parts: the microbatches as one batch, and as many tokens in each row."""
    from jax import numpy as jnp

    return {
        key: jnp.concatenate([batch[key] for batch in batches]) for key in batches[0]
    }


class Microbatch(Jax):
    """``optax.microbatching.microbatch`` of a gradient: of the whole group as one batch, in parts of a size that is a setting."""

    settings = ("microbatch_size=1", "microbatch_size=None")

    def __init__(self, function: Any, accumulator: str, divide: bool) -> None:
        super().__init__(
            self._one, (ANY if divide else MASK)._replace(merges_microbatches=True)
        )
        self._function, self._accumulator, self._divide = function, accumulator, divide
        self._setting = self.settings[1]

    def select_setting(self, setting: str) -> None:
        """How it cuts."""
        self._setting = setting

    def _one(
        self, problem: Problem, params: Any, opt_state: Any, batches: list[Any]
    ) -> Any:
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
MEANS = (
    "“use_grad_mean: if ``True`` (the default), gradients accumulated over multiple mini-steps are averaged. Otherwise, they "
    "are summed.”"
)
COMBINED = (
    "“this transformation requires knowledge of how the individual microbatch results should be combined back together (SUM, MEAN, "
    "or CONCAT)”"
)
COLUMNS = [
    Column(
        "optax.MultiSteps",
        MultiSteps,
        PACKAGES,
        "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html, and the docstring",
        f"{MEANS} The loss is the mean over a mini-batch, as in the example. What is saved is in the middle of an accumulation.",
        gives="mean of means",
        promises=dict.fromkeys(("T1", "T4", "T14"), MEANS),
    ),
    Column(
        "optax.MultiSteps, sums",
        lambda: MultiSteps(sums=True),
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
        f"{COMBINED}: MEAN of the gradients of mean losses, in microbatches of one row.",
        gives="row means",
        promises={"T17": COMBINED},
    ),
    Column(
        "optax.microbatch, SUM",
        lambda: Microbatch(loss_sum, "SUM", divide=True),
        PACKAGES,
        "the docstring of optax.microbatching.microbatch",
        "SUM of the gradients of sums, divided once by the count; no step where nothing counts.",
        documented=False,
    ),
]
