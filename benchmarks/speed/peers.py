"""Do all ways to do one update arrive at the same parameters?

The ways are written as their own users write them: the same model, the same data, float32, AdamW, gradients normalised by the
group's true number of tokens; and each also computes what purestep reports, the loss and the norm of the gradients. The
other benchmarks time these ways; run alone, this file checks them, in float32 and in float64.

The yardstick is the distance that the parameters travel. AdamW's first steps are nearly g / |g|, so where rounding
decides the sign of a gradient, a coordinate may go the other way, and ends up to 2 steps off. A sum of n terms has a
rounding error of about u √n of its terms' size (u half a unit in the last place); if gradients near zero are as dense as in
their bulk, that is also the share of coordinates which are so small. The rest is off by much less:

    ‖θ − θ_by_hand‖  ≤  2 √(u √n) ‖θ_by_hand − θ₀‖        n tokens: 0.003 in float32, 1.3e-7 in float64

    python -m benchmarks.speed.peers
"""

import argparse
import contextlib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from benchmarks.speed import timing
from purestep import tree
from purestep.examples import gpt

CONFIG = gpt.Config(context=64, layers=5, width=256, heads=8)
LARGE = gpt.Config(context=64, layers=8, width=512, heads=8)
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
BY_HAND, BY_HAND_COMPILED, JAX = "by hand", "by hand, compiled", "JAX, optax"
PURE, PURE_KEPT, PURE_COMPILED = (
    "purestep",
    "purestep, not donated",
    "purestep, compiled",
)
BRIDGED = "purestep, make_backward"
Batch = dict[str, Tensor]


class Metrics(NamedTuple):
    """What every way reports."""

    loss: Any
    grad_norm: Any


class Way(NamedTuple):
    """One update of a state of its own, a function to the parameters, and one from a group to the data that updates take."""

    update: Callable[[Any], Metrics]
    params: Callable[[], Any]
    data: Callable[[list[Batch]], Any] = lambda group: group


@dataclass(frozen=True)
class Problem:
    """What to train: parameters, a loss per token, and their sum, as people write it who need no more; the model in JAX."""

    params: Any
    token_losses: Callable[[Any, Batch], Tensor]
    loss_sum: Callable[[Any, Batch], Tensor]
    logits_in_jax: Callable[[Any, Any], Any] | None = None


def gpt_problem(config: gpt.Config, dtype: torch.dtype = torch.float32) -> Problem:
    """The GPT of the examples."""

    def token_losses(params: Any, batch: Batch) -> Tensor:
        return ps.losses.cross_entropy(
            gpt.apply(config, params, batch["tokens"]), batch["labels"]
        )

    def loss_sum(params: Any, batch: Batch) -> Tensor:
        logits = gpt.apply(config, params, batch["tokens"]).flatten(0, 1)
        return functional.cross_entropy(
            logits, batch["labels"].flatten(), reduction="sum"
        )

    params = gpt.init(config, torch.Generator().manual_seed(0), dtype)
    params = tree.map(lambda leaf: leaf.to(timing.device()), params)
    return Problem(
        params, token_losses, loss_sum, functools.partial(gpt_in_jax, config)
    )


def group_of(k: int, rows: int, lengths: list[int], seed: int = 0) -> list[Batch]:
    """K microbatches of random bytes; 10 to 50 % of their labels, 30 % of all, are to be ignored."""
    generator, device = torch.Generator().manual_seed(seed), timing.device()
    group = []
    for position in range(k):
        shape = (rows, lengths[position % len(lengths)])
        share = 0.1 + 0.4 * position / (k - 1) if k > 1 else 0.3
        tokens, labels = (
            torch.randint(0, 256, shape, generator=generator) for _ in range(2)
        )
        labels.masked_fill_(torch.rand(shape, generator=generator) < share, -100)
        group.append({"tokens": tokens.to(device), "labels": labels.to(device)})
    return group


def count(group: list[Batch]) -> Tensor:
    """The group's tokens."""
    return torch.stack([(batch["labels"] != -100).sum() for batch in group]).sum()


def norm_of(grads: list[Any]) -> Tensor:
    """The norm of all gradients as one vector."""
    total_norm: Any = nn.utils.get_total_norm
    return total_norm(grads)


def purestep(
    problem: Problem,
    ensemble: bool = False,
    around: Callable[..., Any] | None = None,
    **how: Any,
) -> Way:
    """``ps.make_update_step``, told ``how``; of each member of an ensemble; with something ``around`` the whole step."""
    optimizer = ps.optim.adamw(LEARNING_RATE, *BETAS, EPS, WEIGHT_DECAY)
    step: Any = ps.make_update_step(problem.token_losses, optimizer, **how)
    init: Any = optimizer.init
    if ensemble:
        step, init = torch.vmap(step, in_dims=(0, 0, None)), torch.vmap(init)
    step = around(step) if around else step
    params = tree.map(Tensor.clone, problem.params)
    opt_state = tree.map(Tensor.clone, init(params))

    def update(group: list[Batch]) -> Metrics:
        nonlocal params, opt_state
        params, opt_state, metrics = step(params, opt_state, group)
        return Metrics(metrics.loss, metrics.grad_norm)

    return Way(update, lambda: params)


class Model(nn.Module):
    """The same function as a module: from a microbatch to the sum of its losses."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.params = tree.map(lambda leaf: nn.Parameter(leaf.clone()), problem.params)
        self.leaves = nn.ParameterList(tree.leaves(self.params))
        self.loss_sum = problem.loss_sum

    def forward(self, batch: Batch) -> Tensor:
        """The sum of the losses."""
        return self.loss_sum(self.params, batch)


def torch_adamw(params: Any, **how: Any) -> torch.optim.AdamW:
    """torch's own optimizer."""
    return torch.optim.AdamW(
        params, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, **how or {"fused": True}
    )


def by_hand(problem: Problem, compile: bool = False, **how: Any) -> Way:
    """The loop that everyone writes who counts tokens: each microbatch's sum over the group's count, and ``.backward()``."""
    model = Model(problem)
    optimizer = torch_adamw(model.parameters(), **how)
    loss_of = torch.compile(model) if compile else model

    def update(group: list[Batch]) -> Metrics:
        num_tokens = count(group)
        total = torch.zeros((), device=num_tokens.device)
        for batch in group:
            loss = loss_of(batch) / num_tokens
            loss.backward()
            total += loss.detach()
        grad_norm = norm_of([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Metrics(total, grad_norm)

    return Way(update, lambda: tree.map(Tensor.detach, model.params))


def bridged(problem: Problem) -> Way:
    """The loop by hand, whose backward passes are those of ``ps.make_backward``."""
    model = Model(problem)
    optimizer = torch_adamw(model.parameters())

    def token_losses(model: Model, batch: Batch) -> Tensor:
        return problem.token_losses(model.params, batch)

    backward = ps.make_backward(model, token_losses)

    def update(group: list[Batch]) -> Metrics:
        metrics = backward(group)
        optimizer.step()
        return Metrics(metrics.loss, metrics.grad_norm)

    return Way(update, lambda: tree.map(Tensor.detach, model.params))


def torchtune(problem: Problem) -> Way:
    """torchtune's recipes: gradients of sums, and a pass that scales them (its ``scale_grads``)."""
    model = Model(problem)
    optimizer = torch_adamw(model.parameters())

    def scale_grads(scaler: Tensor) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= scaler

    def update(group: list[Batch]) -> Metrics:
        num_tokens = torch.zeros((), dtype=torch.int64, device=timing.device())
        running_loss = torch.zeros((), device=timing.device())
        for batch in group:
            num_tokens += (batch["labels"] != -100).sum()
            loss = model(batch)
            running_loss += loss.detach()
            loss.backward()
        scale_grads(1 / num_tokens)
        grad_norm = norm_of([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Metrics(running_loss / num_tokens, grad_norm)

    return Way(update, lambda: tree.map(Tensor.detach, model.params))


def accelerate(problem: Problem) -> Way:
    """Hugging Face Accelerate, as its guide does it for samples of variable size."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=timing.device().type == "cpu")
    module = Model(problem)
    model, optimizer = accelerator.prepare(module, torch_adamw(module.parameters()))

    def update(group: list[Batch]) -> Metrics:
        accelerator.gradient_accumulation_steps = steps = len(group)
        num_items = (
            accelerator.gather(sum((b["labels"] != -100).sum() for b in group))
            .sum()
            .item()
        )
        total = torch.zeros((), device=accelerator.device)
        for position, batch in enumerate(group):
            alone = position == steps - 1 or accelerator.num_processes == 1
            with contextlib.nullcontext() if alone else model.no_sync():
                # Undoes Accelerate's mean over microbatches and DistributedDataParallel's over ranks.
                loss = model(batch) * steps * accelerator.num_processes / num_items
                accelerator.backward(loss)
            total += loss.detach() / steps
        grad_norm = norm_of([p.grad for p in module.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Metrics(total, grad_norm)

    return Way(update, lambda: tree.map(Tensor.detach, module.params))


def func_gradients(
    problem: Problem,
) -> Callable[[Any, list[Batch]], tuple[Any, Metrics]]:
    """``torch.func.grad_and_value`` of each microbatch, and its results added."""

    def loss_of(params: Any, batch: Batch, num_tokens: Tensor) -> Tensor:
        return problem.loss_sum(params, batch) / num_tokens

    grad_and_value = torch.func.grad_and_value(loss_of)

    def gradients(params: Any, group: list[Batch]) -> tuple[Any, Metrics]:
        num_tokens = count(group)
        grads, total = grad_and_value(params, group[0], num_tokens)
        for batch in group[1:]:
            more, loss = grad_and_value(params, batch, num_tokens)
            grads, total = tree.map(torch.add, grads, more), total + loss
        return grads, Metrics(total, norm_of(tree.leaves(grads)))

    return gradients


def torch_func(problem: Problem) -> Way:
    """``torch.func`` as it comes, and torch's optimizer."""
    params = tree.map(Tensor.clone, problem.params)
    leaves = tree.leaves(params)
    optimizer = torch_adamw(leaves)
    gradients = func_gradients(problem)

    def update(group: list[Batch]) -> Metrics:
        grads, metrics = gradients(params, group)
        for leaf, grad in zip(leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return metrics

    return Way(update, lambda: params)


def torchopt(problem: Problem) -> Way:
    """TorchOpt's functional AdamW over ``torch.func``."""
    import torchopt

    optimizer: Any = torchopt.adamw(LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY)
    params = tree.map(Tensor.clone, problem.params)
    opt_state = optimizer.init(params)
    gradients = func_gradients(problem)

    def update(group: list[Batch]) -> Metrics:
        nonlocal params, opt_state
        grads, metrics = gradients(params, group)
        updates, opt_state = optimizer.update(grads, opt_state, params=params)
        params = torchopt.apply_updates(params, updates)
        return metrics

    return Way(update, lambda: params)


def gpt_in_jax(config: gpt.Config, params: Any, tokens: Any) -> Any:
    """``gpt.apply`` in JAX. (``jax.nn.dot_product_attention`` is the same on a CPU, but for float64, which it rounds.)"""
    import jax
    from jax import numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale

    time = tokens.shape[1]
    causal = jnp.tril(jnp.ones((time, time), bool))
    x = params["embedding"][tokens] + params["position"][:time]
    for layer in params["layers"]:
        qkv = norm(x, layer["norms"][0]) @ layer["qkv"]
        query, key, value = jnp.moveaxis(
            qkv.reshape(*tokens.shape, 3, config.heads, -1), 2, 0
        )
        scores = jnp.einsum("bqhd, bkhd -> bhqk", query, key) / query.shape[-1] ** 0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk, bkhd -> bqhd", shares, value)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        up = norm(x, layer["norms"][1]) @ layer["up"]
        x = x + jax.nn.gelu(up, approximate=False) @ layer["down"]
    return norm(x, params["norm"]) @ params["embedding"].T


def to_jax(leaf: Tensor) -> Any:
    """The same numbers for JAX, in memory of its own."""
    from jax import numpy as jnp

    return jnp.array(jnp.from_dlpack(leaf.contiguous()))


def jax_optax(problem: Problem, ensemble: bool = False) -> Way:
    """JAX and optax: one jitted function, microbatches in a scan, parameters and state donated; data are JAX's own."""
    import jax
    import optax
    from jax import numpy as jnp

    logits_of: Any = problem.logits_in_jax
    optimizer: Any = optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=WEIGHT_DECAY)

    def loss_of(params: Any, batch: Any, num_tokens: Any) -> Any:
        logits, labels = logits_of(params, batch["tokens"]), batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(labels, 0)
        )
        return jnp.where(labels != -100, losses, 0).sum() / num_tokens

    def plain_step(params: Any, opt_state: Any, group: Any) -> Any:
        num_tokens = (group["labels"] != -100).sum()

        def add(sums: Any, batch: Any) -> Any:
            more = jax.value_and_grad(loss_of)(params, batch, num_tokens)
            return jax.tree.map(jnp.add, sums, more), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        nothing = jnp.zeros((), jax.tree.leaves(params)[0].dtype)
        (loss, grads), _ = jax.lax.scan(add, (nothing, zeros), group)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = Metrics(loss, optax.global_norm(grads))
        return optax.apply_updates(params, updates), opt_state, metrics

    init = optimizer.init
    step: Any = jax.default_matmul_precision("highest")(plain_step)
    if ensemble:
        step, init = jax.vmap(step, in_axes=(0, 0, None)), jax.vmap(init)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = tree.map(to_jax, problem.params)
    opt_state = init(params)

    def data(group: list[Batch]) -> Any:
        stacked = {
            key: torch.stack([batch[key] for batch in group]) for key in group[0]
        }
        return {
            key: to_jax(x if x.is_floating_point() else x.int())
            for key, x in stacked.items()
        }

    def update(group: Any) -> Metrics:
        nonlocal params, opt_state
        params, opt_state, metrics = jitted(params, opt_state, group)
        jax.block_until_ready((params, opt_state, metrics))
        return metrics

    return Way(update, lambda: tree.map(torch.utils.dlpack.from_dlpack, params), data)


WAYS: dict[str, Callable[[Problem], Way]] = {
    BY_HAND: by_hand,
    PURE: functools.partial(purestep, donate=True),
    PURE_KEPT: functools.partial(purestep, donate=False),
    BRIDGED: bridged,
    "torchtune": torchtune,
    "Accelerate": accelerate,
    "torch.func": torch_func,
    "TorchOpt": torchopt,
    BY_HAND_COMPILED: functools.partial(by_hand, compile=True),
    PURE_COMPILED: functools.partial(purestep, compile=True, donate=True),
    JAX: jax_optax,
}


def ways_without(names: list[str]) -> dict[str, Callable[[Problem], Way]]:
    """All ways but these; and without JAX where it does not run on the device that torch runs on."""
    unknown = set(names) - set(WAYS)
    if unknown:
        raise SystemExit(f"no such ways: {sorted(unknown)}; there are {list(WAYS)}")
    if BY_HAND in names:
        raise SystemExit(f"{BY_HAND!r} is what the others are compared to")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    left = {name: make for name, make in WAYS.items() if name not in names}
    if JAX in left and timing.device().type == "cuda":
        import jax

        if jax.default_backend() != "gpu":
            del left[JAX]
    return left


def bound(group: list[Batch], dtype: torch.dtype) -> float:
    """How far rounding may take two ways apart, of the distance travelled: see above."""
    return 2 * math.sqrt(torch.finfo(dtype).eps / 2 * math.sqrt(int(count(group))))


def check(
    problem: Problem, ways: dict[str, Way], group: list[Batch]
) -> dict[str, float]:
    """Each way's distance from ``by hand``, of the distance travelled; ends the program where it exceeds the bound."""

    def norm(a: Any, b: Any) -> float:
        return float(tree.global_norm(tree.map(torch.sub, a, b)))

    reference = tree.map(Tensor.clone, ways[BY_HAND].params())
    travelled = norm(reference, problem.params)
    distances = {
        name: norm(way.params(), reference) / travelled for name, way in ways.items()
    }
    limit = bound(group, tree.leaves(reference)[0].dtype)
    for name, distance in distances.items():
        if not distance <= limit:
            raise SystemExit(
                f"{name} ended at other parameters than {BY_HAND}: {distance:.1e} of the distance travelled, "
                f"where rounding explains {limit:.1e}"
            )
    return distances


def check_logits(config: gpt.Config, problem: Problem, batch: Batch) -> None:
    """Ends the program unless the model in JAX gives the logits of the model in torch, to rounding: u √n for n = 4 · width."""
    wanted = gpt.apply(config, problem.params, batch["tokens"])
    params, tokens = tree.map(to_jax, problem.params), to_jax(batch["tokens"].int())
    found = torch.utils.dlpack.from_dlpack(gpt_in_jax(config, params, tokens))
    distance = float((found - wanted).norm() / wanted.norm())
    limit = torch.finfo(wanted.dtype).eps * math.sqrt(4 * config.width)
    print(
        f"logits of the model in JAX: {distance:.1e} from those in torch; bound {limit:.1e}"
    )
    if not distance <= limit:
        raise SystemExit("the model in JAX is not the model in torch")


def compare(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """A few updates of every way, compared and printed."""
    torch.set_default_dtype(dtype)  # TorchOpt computes its bias corrections in it
    problem = gpt_problem(CONFIG, dtype)
    groups = [group_of(8, 4, [CONFIG.context], seed) for seed in range(options.updates)]
    ways = {
        name: make(problem) for name, make in ways_without(options.leave_out).items()
    }
    if JAX in ways:
        check_logits(CONFIG, problem, groups[0][0])
    metrics = {
        name: [way.update(way.data(group)) for group in groups][-1]
        for name, way in ways.items()
    }
    distances = check(problem, ways, groups[0])
    print(f"{dtype}, {options.updates} updates; bound {bound(groups[0], dtype):.1e}")
    for name, distance in distances.items():
        loss, grad_norm = (float(value) for value in metrics[name])
        print(f"  {name:>22}: {distance:.1e}   loss {loss:.6f}, norm {grad_norm:.6f}")


def main() -> None:
    """Checks all ways in float32, then in float64."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--leave-out", nargs="*", default=[], help="names of ways")
    options = parser.parse_args()
    os.environ["JAX_ENABLE_X64"] = "1"
    for dtype in (torch.float32, torch.float64):
        compare(options, dtype)


if __name__ == "__main__":
    main()
