"""Trains an unmodified GPT-2 of transformers, all its dropouts on, on groups cut in four ways.

With purestep, and keys for the dropouts, the four cuts over one rank and over two are one training
run: the parameters differ by rounding. The usual loop takes a mean for each microbatch and torch's
global generator: the four cuts are four different runs.

It takes the extra: ``pip install 'purestep[huggingface]'``.

    python -m purestep.examples.cut_invariance
"""

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import purestep as ps
from purestep import tree
from purestep.examples import picture
from purestep.examples.docstrings import extract_docstrings, relative_distance

Params = dict[str, Tensor]
Batch = dict[str, Tensor]
Group = list[Batch]
Cut = Callable[[Group], Group]
Run = list[Params]
"""The parameters after each update."""
Distances = dict[str, list[float]]
"""For each kind of run, the largest distance after each update."""

CONTEXT = 64
GROUP = 12  # docstrings in an update
RATE = 3e-3
UNLIMITED = 10**9  # tokens
OPTIMIZER = ps.optim.adamw(RATE)


def pack_all(group: Group) -> Group:
    """Packs examples into one microbatch, padded to the longest; returns it in a list.

    Without tokens, the list is empty.
    """
    return ps.pack(group, max_tokens=UNLIMITED)


def pack_fours(group: Group) -> Group:
    """Packs each four successive examples into one microbatch; the last may have fewer."""
    microbatches = []
    for four in ps.group(group, 4):
        microbatches += pack_all(four)
    return microbatches


def pack_by_length(group: Group) -> Group:
    """Packs examples of similar length into microbatches of at most 256 tokens.

    Padding counts, too.
    """
    return ps.pack(group, max_tokens=256)


def pack_each(examples: Group) -> Group:
    """Makes one microbatch of each example, in order."""
    microbatches = []
    for example in examples:
        microbatches += pack_all([example])
    return microbatches


CUTS: dict[str, Cut] = {
    "one large microbatch": pack_all,
    "in order of arrival, fours": pack_fours,
    "by length, 256 tokens at most": pack_by_length,
    "one by one": pack_each,
}


def make_gpt2(dtype: torch.dtype) -> GPT2LMHeadModel:
    """Makes a small GPT-2 in training mode, with the same weights each time.

    It seeds torch's global generator with 0. The model drops 0.1 of the embedding, of attention and
    of both residuals.
    """
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).to(dtype).train()


def sample_groups(steps: int) -> list[Group]:
    """Draws 12 of asyncio's docstrings for each update, with replacement; returns a list of groups.

    An example has the first 64 bytes as tokens, their labels, and a key. The key depends on the
    run's key and on the example's number in the run, so a docstring drawn twice gets two keys. Each
    call draws the same.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(stdlib.glob("asyncio/*.py"))
    texts = extract_docstrings(files)
    generator = torch.Generator().manual_seed(0)
    num_examples = steps * GROUP
    order = torch.randint(len(texts), (num_examples,), generator=generator)
    examples = []
    for i in order.tolist():
        data = texts[i].encode()[:CONTEXT]
        tokens = torch.tensor(list(data))
        labels = ps.shift_labels(tokens)
        examples.append({"tokens": tokens, "labels": labels})
    key = ps.random.key(0)
    keyed = ps.random.with_keys(examples, key)
    return list(ps.group(keyed, GROUP))


def train(
    axis: ps.testing.ThreadAxis | ps.MeshAxis,
    model: GPT2LMHeadModel,
    cut: Cut,
    data: list[Group],
    optimizer: ps.optim.Optimizer = OPTIMIZER,
) -> Run:
    """Trains on this rank's share of each group; returns the parameters after each update.

    ``cut`` makes microbatches of a share. The model keeps its own parameters. All ranks of the axis
    call it together.
    """
    params, apply = ps.from_module(model)

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        output = apply(
            params,
            input_ids=batch["tokens"],
            use_cache=False,
            key=batch["key"],
        )
        return ps.losses.cross_entropy(output.logits, batch["labels"])

    update_step = ps.make_update_step(loss_fn, optimizer, axis=axis)
    opt_state = optimizer.init(params)
    run = []
    for group in data:
        shares = ps.balance(group, ranks=axis.size)
        share = shares[axis.rank]
        microbatches = cut(share)
        params, opt_state, _ = update_step(params, opt_state, microbatches)
        run.append(params)
    return run


def train_on_threads(
    cut: Cut, num_ranks: int, data: list[Group], dtype: torch.dtype
) -> Run:
    """Trains a GPT-2 with purestep over ranks that are threads; returns the run of the first.

    The model is that of ``make_gpt2``, which seeds torch's global generator.
    """
    axis = ps.testing.ThreadAxis(num_ranks)
    model = make_gpt2(dtype)

    def train_on_rank(rank: int) -> Run:
        return train(axis, model, cut, data)

    train_on_ranks = axis.map(train_on_rank)
    runs: list[Run] = train_on_ranks(range(num_ranks))
    return runs[0]


def train_all_cuts(data: list[Group], dtype: torch.dtype) -> list[Run]:
    """Trains with purestep on each cut, first over one rank, then over two; returns the 8 runs."""
    runs = []
    for num_ranks in (1, 2):
        for cut in CUTS.values():
            run = train_on_threads(cut, num_ranks, data, dtype)
            runs.append(run)
    return runs


def train_in_usual_loop(cut: Cut, data: list[Group], dtype: torch.dtype) -> Run:
    """Trains GPT-2 with a loop that averages microbatch means, however many tokens each has.

    Seeds torch's global generator, from which dropout draws. Returns the parameters after each
    update.
    """
    model = make_gpt2(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    run = []
    # The dropouts draw from the global generator.
    torch.manual_seed(1)
    for group in data:
        microbatches = cut(group)
        for batch in microbatches:
            output = model(input_ids=batch["tokens"], use_cache=False)
            logits = output.logits.flatten(0, 1)
            labels = batch["labels"].flatten()
            loss = functional.cross_entropy(logits, labels)
            loss = loss / len(microbatches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        params = {}
        for name, parameter in model.named_parameters():
            params[name] = parameter.detach().clone()
        run.append(params)
    return run


def measure_distances(runs: list[Run]) -> list[float]:
    """Returns, after each update, the largest relative distance of any run from the first."""
    largest = []
    for first, *others in zip(*runs, strict=True):
        distances = [relative_distance(other, first) for other in others]
        largest.append(max(distances))
    return largest


def concatenate(params: Params) -> Tensor:
    """Joins all parameters to one vector, detached."""
    leaves = tree.leaves(params)
    vectors = [leaf.detach().flatten() for leaf in leaves]
    return torch.cat(vectors)


def project(runs: list[Run], num_spanning: int) -> list[Tensor]:
    """Projects runs onto the plane in which the ends of the first ``num_spanning`` differ most.

    Each run becomes a tensor of shape (2, updates + 1) that begins at the origin: the initial
    parameters.
    """
    model = make_gpt2(torch.float64)
    start = concatenate(dict(model.named_parameters()))
    paths = []
    for run in runs:
        points = [concatenate(params) for params in run]
        path = torch.stack([start, *points])
        paths.append(path - start)
    ends = [path[-1] for path in paths[:num_spanning]]
    stacked = torch.stack(ends)
    centred = stacked - stacked.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh
    plane = directions[:2]
    return [plane @ path.T for path in paths]


def plot_path(axes: Any, path: Tensor, color: str) -> None:
    """Plots a projected run, with a dot at its end."""
    x, y = path
    picture.plot_line(axes, x, y, color)
    axes.plot(x[-1], y[-1], "o", color=color)


def plot_paths(axes: Any, usual: list[Run], pure: list[Run]) -> None:
    """Plots the paths of the parameters in one plane: the usual loop's, then purestep's.

    The plane is that of ``project``, by the ends of the usual runs and of one of purestep.
    """
    num_usual = len(usual)
    paths = project([*usual, *pure], num_spanning=num_usual + 1)
    for path in paths[:num_usual]:
        plot_path(axes, path, picture.ORANGE)
    for path in paths[num_usual:]:
        plot_path(axes, path, picture.BLUE)
    axes.plot(0, 0, "o", color=picture.GREY)
    picture.annotate(axes, "start", (0, 0), picture.GREY, shift=(4, -11))

    cuts = f"{len(CUTS)} cuts"
    axes.text(
        0.0,
        -0.03,
        f"the usual loop, {cuts}:\n{len(usual)} runs, {len(usual)} curves",
        color=picture.ORANGE,
        fontsize=11,
        transform=axes.transAxes,
        va="top",
    )
    axes.text(
        0.42,
        -0.03,
        f"purestep, {cuts} on 1 rank and on 2:\n{len(pure)} runs, one curve",
        color=picture.BLUE,
        fontsize=11,
        transform=axes.transAxes,
        va="top",
    )
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal", "datalim")
    axes.set_xticks([])
    axes.set_yticks([])


def plot_distances(axes: Any, distances: Distances) -> None:
    """Plots the largest distance between runs over the updates, a curve for each kind of run."""
    for name, values in distances.items():
        color = picture.ORANGE if "usual" in name else picture.BLUE
        updates = range(1, len(values) + 1)
        picture.plot_line(axes, updates, values, color)
        picture.annotate_end(axes, name, updates, values, color, shift=(0, 9))
    axes.set_yscale("log")
    axes.set_ylim(1e-17, 3)
    axes.set_xlim(0)
    axes.set_xlabel("update")


def main(arguments: Sequence[str] | None = None) -> Distances:
    """Trains all runs; returns how far apart they are after each update, and saves a picture.

    Prints how far apart they are at the end.
    """
    parser = picture.make_parser(__doc__, "cut_invariance", 20)
    options = parser.parse_args(arguments)
    data = sample_groups(options.steps)
    exact = train_all_cuts(data, torch.float64)
    rounded = train_all_cuts(data, torch.float32)
    usual = []
    for cut in CUTS.values():
        run = train_in_usual_loop(cut, data, torch.float64)
        usual.append(run)
    distances = {
        "purestep, float64": measure_distances(exact),
        "purestep, float32": measure_distances(rounded),
        "the usual loop, float64": measure_distances(usual),
    }
    print(
        f"{len(exact)} runs of purestep, {len(usual)} of the usual loop, "
        f"{options.steps} updates"
    )
    for name, values in distances.items():
        print(
            f"largest distance from the first run, {name}: {values[-1]:.1e} of its norm"
        )

    figure, (left_axes, right_axes) = picture.make_panels(
        "Parameters on their way, seen where the ends differ most",
        "Largest distance from the first cut, ‖θ − θ₁‖ / ‖θ₁‖",
    )
    plot_paths(left_axes, usual, exact)
    plot_distances(right_axes, distances)
    picture.save(figure, options.picture)
    return distances


if __name__ == "__main__":
    main()
