"""The same GPT, loss, clipping and AdamW by JAX and optax: one jitted update with a scan."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.gpu.entries import Run
from benchmarks.gpu.gpt import DECAY, RATE
from benchmarks.gpu.models import Sizes, gpt_sizes

SECONDS_FOR_A_WAY = 25
"""To compile and to measure."""


def run_jax(run: Run) -> None:
    """Measures it where JAX is installed."""
    if not run.is_cuda:
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        import jax
        import optax  # noqa: F401
    except ImportError as error:
        run.add(skipped=str(error))
        return
    run.add(jax=jax.__version__, device=str(jax.devices()[0]))
    bench = Bench(run)
    for number in (1, 2) if run.tiny else (1, 4):
        for implementation in ("cudnn", "xla") if run.is_cuda else ("xla",):
            path = (f"K={number}", f"attention by {implementation}")
            if run.has_time(SECONDS_FOR_A_WAY, *path):
                with run.attempt(*path):
                    bench.measure(path, number, implementation)
                    break  # The first that works.


class Bench:
    """The network as a tree of arrays."""

    def __init__(self, run: Run) -> None:
        import numpy

        self.run = run
        self.sizes: Sizes = gpt_sizes(run)
        self.random = numpy.random.default_rng(0)

    def make_params(self) -> Any:
        """Returns random params."""
        import jax.numpy as jnp

        width = self.sizes.width

        def normal(*shape: int) -> Any:
            return jnp.asarray(self.random.normal(0, 0.02, shape), jnp.float32)

        def dense(inputs: int, outputs: int) -> Any:
            return {"weight": normal(inputs, outputs), "bias": jnp.zeros(outputs)}

        def norm() -> Any:
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        def block() -> Any:
            return {
                "norm_attention": norm(),
                "qkv": dense(width, 3 * width),
                "out": dense(width, width),
                "norm_mlp": norm(),
                "up": dense(width, 4 * width),
                "down": dense(4 * width, width),
            }

        return {
            "tokens": normal(self.sizes.vocabulary, width),
            "positions": normal(self.sizes.context, width),
            "blocks": [block() for _ in range(self.sizes.layers)],
            "norm": norm(),
        }

    def make_batch(self, number: int) -> Any:
        """Returns so many microbatches of random text, stacked."""
        import jax.numpy as jnp

        shape = (number, self.sizes.rows, self.sizes.context)
        tokens = self.random.integers(0, self.sizes.vocabulary, shape)
        labels = self.random.integers(0, self.sizes.vocabulary, shape)
        labels[self.random.random(shape) < 0.05] = -100
        return {
            "tokens": jnp.asarray(tokens, "int32"),
            "labels": jnp.asarray(labels, "int32"),
        }

    def measure(self, path: tuple[str, ...], number: int, implementation: str) -> None:
        """Compiles an update, and times it in blocks."""
        import jax

        update, init = make_update(self.sizes.heads, implementation)
        batch = self.make_batch(number)
        params = self.make_params()
        state = [params, init(params)]

        def take_updates(repeats: int) -> float:
            begin = time.perf_counter()
            for _ in range(repeats):
                *state[:], loss = update(*state, batch)
            jax.block_until_ready((state, loss))
            return time.perf_counter() - begin

        self.run.add(*path, first_seconds=round(take_updates(1), 2))
        once = take_updates(1)
        repeats = max(2, min(50, int(0.5 / once)))
        seconds = statistics.median(take_updates(repeats) for _ in range(3)) / repeats
        tokens = number * self.sizes.rows * self.sizes.context
        self.run.add(
            *path, ms=round(1000 * seconds, 3), tokens_per_s=round(tokens / seconds)
        )
        stats = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            self.run.add(*path, peak_mib=round(stats["peak_bytes_in_use"] / 2**20, 1))


def make_update(heads: int, implementation: str) -> tuple[Any, Any]:
    """Returns a jitted update, and what makes its optimizer's state."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=DECAY)
    )
    forward = partial(apply_gpt, heads=heads, implementation=implementation)

    def compute_loss(params: Any, microbatch: Any, number: Any) -> Any:
        logits = forward(params, microbatch["tokens"]).astype(jnp.float32)
        labels = microbatch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(labels, 0)
        )
        return jnp.where(labels != -100, losses, 0).sum() / number

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        number = (batch["labels"] != -100).sum()

        def add_microbatch(total: Any, microbatch: Any) -> Any:
            loss, grads = jax.value_and_grad(compute_loss)(params, microbatch, number)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = jax.lax.scan(add_microbatch, zeros, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.sum()

    return jax.jit(update, donate_argnums=(0, 1)), optimizer.init


def apply_gpt(params: Any, tokens: Any, *, heads: int, implementation: str) -> Any:
    """Returns logits; products are in bfloat16, norms in float32."""
    import jax
    import jax.numpy as jnp

    half = jnp.bfloat16

    def norm(x: Any, leaf: Any) -> Any:
        x = x.astype(jnp.float32)
        variance = x.var(-1, keepdims=True)
        scaled = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5)
        return scaled * leaf["scale"] + leaf["bias"]

    def dense(x: Any, leaf: Any) -> Any:
        return x.astype(half) @ leaf["weight"].astype(half) + leaf["bias"].astype(half)

    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        qkv = jnp.split(dense(norm(x, block["norm_attention"]), block["qkv"]), 3, -1)
        query, key, value = (part.reshape(*part.shape[:2], heads, -1) for part in qkv)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        x = x + dense(mixed.reshape(x.shape), block["out"]).astype(jnp.float32)
        hidden = jax.nn.gelu(dense(norm(x, block["norm_mlp"]), block["up"]))
        x = x + dense(hidden, block["down"]).astype(jnp.float32)
    return norm(x, params["norm"]).astype(half) @ params["tokens"].astype(half).T
