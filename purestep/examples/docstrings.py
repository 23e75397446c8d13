"""Trains a byte-level GPT on the docstrings of Python's standard library, three times over.

Once with each group of docstrings in one large batch; once with the same group cut into microbatches over
simulated ranks; and once cut the same way, but with the mean of the microbatches' means that most training
loops compute. The picture shows how far the last two end up from the first, step by step.

    python -m purestep.examples.docstrings --help
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from tqdm import tqdm

import purestep as ps
from purestep import tree
from purestep.examples import gpt

Batch = dict[str, Tensor]

CONFIG = gpt.Config()


def docstrings() -> list[bytes]:
    """Every docstring of the standard library that is longer than a line: a few bytes to thousands."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in folder.glob("[!_]*.py"))
    files += sorted(
        f for name in ("asyncio", "email", "json", "logging") for f in (folder / name).glob("*.py")
    )
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        ast.get_docstring(node)
        for file in files
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, kinds)
    }
    return sorted(text.encode() for text in found if text and len(text) > 40)


def batch_of(examples: list[bytes], length: int) -> Batch:
    """Examples as one padded batch: each byte but the last, and the byte that follows it."""
    tokens = torch.zeros(len(examples), length, dtype=torch.int64)
    labels = torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        data = torch.tensor(list(example[: length + 1]))
        tokens[row, : len(data) - 1] = data[:-1]
        labels[row, : len(data) - 1] = data[1:]
    return {"tokens": tokens, "labels": labels}


def cut(examples: list[bytes], ranks: int, microbatches: int) -> list[Batch]:
    """The same examples as microbatches with a leading dimension of ranks, each as long as it must be."""
    size = len(examples) // microbatches
    parts = [examples[k * size : (k + 1) * size] for k in range(microbatches)]
    return [
        tree.map(
            lambda leaf: rearrange(leaf, "(rank b) time -> rank b time", rank=ranks),
            batch_of(part, length_of(part)),
        )
        for part in parts
    ]


def length_of(examples: list[bytes]) -> int:
    """The longest of them, as far as the model can see."""
    return min(CONFIG.context, max(map(len, examples)) - 1)


def groups(corpus: list[bytes], size: int, generator: torch.Generator) -> Iterator[list[bytes]]:
    """Random groups of docstrings, without end."""
    while True:
        order = torch.randperm(len(corpus), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [corpus[i] for i in order[start : start + size]]


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """The loss of each byte."""
    return ps.losses.cross_entropy(gpt.apply(CONFIG, params, batch["tokens"]), batch["labels"])


def mean_of_means_weights(batch: Batch) -> Tensor:
    """The usual mistake as weights: however many tokens a microbatch has, together they weigh 1."""
    present = ps.label_weights(batch).to(torch.float64)
    return present / present.sum()


def sample(params: Any, prompt: str, length: int, generator: torch.Generator) -> str:
    """Text that continues the prompt."""
    tokens = list(prompt.encode())
    for _ in range(length):
        context = torch.tensor([tokens[-CONFIG.context :]])
        logits = gpt.apply(CONFIG, params, context)[0, -1]
        probabilities = torch.softmax(logits / 0.7, -1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


def distance(params: Any, reference: Any) -> float:
    """‖θ − θ*‖ / ‖θ*‖."""
    difference = tree.map(torch.sub, params, reference)
    return float(tree.global_norm(difference) / tree.global_norm(reference))


def draw(path: Path, distances: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    """Distance from the large batch on the left, losses on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"one large batch": "0.6", "purestep": "#0072b2", "mean of means": "#d55e00"}
    widths = {"one large batch": 6.0, "purestep": 1.8, "mean of means": 1.8}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=150, layout="constrained")
    for name, values in distances.items():
        steps = range(1, len(values) + 1)
        left.semilogy(steps, values, color=colors[name], linewidth=1.8)
        left.annotate(
            name, (len(values), values[-1]), (-4, 7), textcoords="offset points",
            color=colors[name], ha="right", fontsize=12,
        )  # fmt: skip
    left.axhspan(1e-17, 2.0**-52, color="0.92")
    left.set_ylim(1e-17, 3)
    left.set_xlabel("step")
    left.set_ylabel("‖θ − θ(one large batch)‖ / ‖θ‖")
    for name in ("one large batch", "mean of means", "purestep"):
        values = losses[name]
        right.plot(values, color=colors[name], linewidth=widths[name], label=name, alpha=0.9)
    right.set_xlabel("step")
    right.set_ylabel("loss per byte")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Trains, prints, draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2, help="simulated data-parallel ranks")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per rank")
    parser.add_argument("--examples", type=int, default=2, help="docstrings per microbatch")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--picture", type=Path, default=Path("docstrings.png"))
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    size = options.ranks * options.microbatches * options.examples
    generator = torch.Generator().manual_seed(0)
    corpus = docstrings()
    print(f"{len(corpus)} docstrings of {min(map(len, corpus))} to {max(map(len, corpus))} bytes")

    schedule = ps.optim.warmup_cosine_decay_schedule(
        0.0, 3e-3, options.steps // 10 + 1, options.steps + 1, 3e-4
    )
    matrices = tree.map(lambda leaf: leaf.ndim > 1, gpt.init(CONFIG, generator))
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )
    axis = ps.VmapAxis(options.ranks)
    over_ranks = {"in_dims": (None, None, 0), "out_dims": None}
    steps = {
        "one large batch": ps.make_update_step(loss_fn, optimizer),
        "purestep": axis.map(ps.make_update_step(loss_fn, optimizer, axis=axis), **over_ranks),
        "mean of means": axis.map(
            ps.make_update_step(loss_fn, optimizer, axis=axis, weight_fn=mean_of_means_weights),
            **over_ranks,
        ),
    }
    params = gpt.init(CONFIG, generator, dtype)
    states = {name: (params, optimizer.init(params)) for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    distances: dict[str, list[float]] = {"mean of means": [], "purestep": []}
    seconds, tokens = 0.0, 0

    stream = groups(corpus, size, generator)
    bar = tqdm(range(options.steps), unit="step")
    for _, examples in zip(bar, stream, strict=False):
        whole = [batch_of(examples, length_of(examples))]
        pieces = cut(examples, options.ranks, options.microbatches)
        for name, step in steps.items():
            start = time.perf_counter()
            *state, metrics = step(*states[name], whole if name == "one large batch" else pieces)
            states[name] = (state[0], state[1])
            losses[name].append(float(metrics.loss))
            if name == "purestep":
                seconds += time.perf_counter() - start
                tokens += int(metrics.num_tokens)
        for name, values in distances.items():
            values.append(distance(states[name][0], states["one large batch"][0]))
        bar.set_postfix_str(f"loss {losses['purestep'][-1]:.3f}, {tokens / seconds:.0f} tokens/s")

    print(f"loss {losses['purestep'][0]:.3f} -> {losses['purestep'][-1]:.3f}")
    print(f"{tokens / seconds:.0f} tokens per second over {options.ranks} simulated ranks")
    for name, values in distances.items():
        print(
            f"distance from one large batch after {options.steps} steps, {name}: {values[-1]:.1e}"
        )
    print("---")
    print(sample(states["purestep"][0], "Return ", 160, generator))
    print("---")
    draw(options.picture, distances, losses)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
