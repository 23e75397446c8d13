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

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import purestep as ps
from purestep import tree
from purestep.examples import picture
from purestep.examples.docstrings import distance, docstrings_of

Params = dict[str, Tensor]
Batch = dict[str, Tensor]
Cut = Callable[[list[Batch]], list[Batch]]

CONTEXT = 64
GROUP = 12  # docstrings in an update
RATE = 3e-3
HUGE = 10**9  # tokens
OPTIMIZER = ps.optim.adamw(RATE)

CUTS: dict[str, Cut] = {
    "one large microbatch": lambda group: ps.pack(group, max_tokens=HUGE),
    "in order of arrival, fours": lambda group: [
        packed
        for four in ps.group(group, 4)
        for packed in ps.pack(four, max_tokens=HUGE)
    ],
    "by length, 256 tokens at most": lambda group: ps.pack(group, max_tokens=256),
    "one by one": lambda group: [ps.pack([each], max_tokens=HUGE)[0] for each in group],
}


def gpt2(dtype: torch.dtype) -> GPT2LMHeadModel:
    """A small one: dropout of 0.1 in the embedding, in attention and in both residuals."""
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, bos_token_id=None,
        eos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).to(dtype).train()


def groups(steps: int) -> list[list[Batch]]:
    """A group of docstrings for each update. Each has a key, of the run and of its number in it."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / "asyncio").glob("*.py"))
    corpus = [list(text.encode()[:CONTEXT]) for text in docstrings_of(files)]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(corpus), (steps * GROUP,), generator=generator)
    tokens = [torch.tensor(corpus[i]) for i in chosen.tolist()]
    examples = [{"tokens": each, "labels": ps.shift_labels(each)} for each in tokens]
    return list(ps.group(ps.random.with_keys(examples, ps.random.key(0)), GROUP))


def train(
    axis: ps.testing.ThreadAxis | ps.MeshAxis,
    model: GPT2LMHeadModel,
    cut: Cut,
    data: list[list[Batch]],
    optimizer: ps.optim.Optimizer = OPTIMIZER,
) -> list[Params]:
    """What one rank does with its share of each group: the parameters after each update."""
    params, apply = ps.from_module(model)

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        output = apply(
            params, input_ids=batch["tokens"], use_cache=False, key=batch["key"]
        )
        return ps.losses.cross_entropy(output.logits, batch["labels"])

    update_step = ps.make_update_step(loss_fn, optimizer, axis=axis)
    opt_state, path = optimizer.init(params), []
    for group in data:
        mine = ps.balance(group, ranks=axis.size)[axis.rank]
        params, opt_state, _ = update_step(params, opt_state, cut(mine))
        path.append(params)
    return path


def pure(
    cut: Cut, ranks: int, data: list[list[Batch]], dtype: torch.dtype
) -> list[Params]:
    """The parameters after each update of purestep's, over so many ranks, which are threads."""
    axis, model = ps.testing.ThreadAxis(ranks), gpt2(dtype)
    first: list[Params] = axis.map(lambda _: train(axis, model, cut, data))(
        [*range(ranks)]
    )[0]
    return first


def usual(cut: Cut, data: list[list[Batch]], dtype: torch.dtype) -> list[Params]:
    """The same of the usual loop, which gives each microbatch the same share whatever is in it."""
    model = gpt2(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    path = []
    torch.manual_seed(1)  # what its dropouts draw from
    for group in data:
        microbatches = cut(group)
        for batch in microbatches:
            logits = model(input_ids=batch["tokens"], use_cache=False).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten()
            )
            (loss / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        path.append({k: p.detach().clone() for k, p in model.named_parameters()})
    return path


def worst(runs: Sequence[list[Params]]) -> list[float]:
    """After each update, the largest distance of any run from the first, relative to it."""
    return [
        max(distance(other, first) for other in others)
        for first, *others in zip(*runs, strict=True)
    ]


def flat(params: Params) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([leaf.detach().flatten() for leaf in tree.leaves(params)])


def plane(runs: Sequence[list[Params]], chosen: int) -> list[tuple[Tensor, Tensor]]:
    """Each run's way, in the plane in which the ends of the first ``chosen`` runs differ most."""
    start = flat(dict(gpt2(torch.float64).named_parameters()))
    ways = torch.stack([torch.stack([start, *map(flat, run)]) - start for run in runs])
    ends = ways[:chosen, -1] - ways[:chosen, -1].mean(0)
    directions = torch.linalg.svd(ends, full_matrices=False).Vh[:2]
    return [(way @ directions[0], way @ directions[1]) for way in ways]


def draw(
    path: Path,
    usual: list[list[Params]],
    pure: list[list[Params]],
    far: dict[str, list[float]],
) -> None:
    """The ways on the left, the distances on the right."""
    figure, (left, right) = picture.panels(
        "Parameters on their way, seen where the ends differ most",
        "Largest distance from the first cut, ‖θ − θ₁‖ / ‖θ₁‖",
    )
    for number, (x, y) in enumerate(plane([*usual, *pure], len(usual) + 1)):
        color = picture.ORANGE if number < len(usual) else picture.BLUE
        left.plot(x, y, color=color, linewidth=1.8)
        left.plot(x[-1], y[-1], "o", color=color)
    left.plot(0, 0, "o", color=picture.GREY)
    picture.say(left, "start", (0, 0), picture.GREY, xytext=(4, -11))
    cuts = f"{len(CUTS)} cuts"
    for place, words, color in [
        (
            0.0,
            f"the usual loop, {cuts}:\n{len(usual)} runs, {len(usual)} curves",
            picture.ORANGE,
        ),
        (
            0.42,
            f"purestep, {cuts} on 1 rank and on 2:\n{len(pure)} runs, one curve",
            picture.BLUE,
        ),
    ]:
        where = {"transform": left.transAxes, "va": "top"}
        left.text(place, -0.03, words, color=color, fontsize=11, **where)
    left.spines[:].set_visible(False)
    left.set_aspect("equal", "datalim")
    left.set_xticks([])
    left.set_yticks([])

    for name, values in far.items():
        color = picture.ORANGE if "usual" in name else picture.BLUE
        right.semilogy(range(1, len(values) + 1), values, color=color, linewidth=1.8)
        picture.say(
            right, name, (len(values), values[-1]), color, xytext=(0, 9), ha="right"
        )
    right.set_ylim(1e-17, 3)
    right.set_xlim(0)
    right.set_xlabel("update")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains all of them; prints, draws and returns how far apart they are after each update."""
    options = picture.parser(__doc__, "cut_invariance", 20).parse_args(arguments)
    data, wide, narrow = groups(options.steps), torch.float64, torch.float32
    arrangements = [(cut, ranks) for ranks in (1, 2) for cut in CUTS.values()]
    exact = [pure(cut, ranks, data, wide) for cut, ranks in arrangements]
    rounded = [pure(cut, ranks, data, narrow) for cut, ranks in arrangements]
    loops = [usual(cut, data, wide) for cut in CUTS.values()]
    far = {
        "purestep, float64": worst(exact),
        "purestep, float32": worst(rounded),
        "the usual loop, float64": worst(loops),
    }
    print(
        f"{len(exact)} runs of purestep, {len(loops)} of the usual loop, {options.steps} updates"
    )
    for name, values in far.items():
        print(
            f"largest distance from the first run, {name}: {values[-1]:.1e} of its norm"
        )
    draw(options.picture, loops, exact, far)
    return far


if __name__ == "__main__":
    main()
