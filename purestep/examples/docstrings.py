"""Trains a byte-level GPT on the docstrings of Python's standard library, three times over.

Once with each group of docstrings in one large batch; once with the same group cut into
microbatches over simulated ranks; and once cut the same way, but with the mean of the microbatches'
means that most training loops compute. The picture shows how far the last two end up from the
first, step by step.

    python -m purestep.examples.docstrings --help

Under ``torchrun`` it trains once, over real ranks; rank 0 speaks for all. With a checkpoint,
processes may be killed or interrupted: the run goes on where it was saved, and ends in the same
bits. It may go on over more or fewer ranks, and in microbatches of a different size: it ends in the
same parameters but for rounding. All other settings have to stay, or the run is refused.

    torchrun --nproc-per-node 2 --max-restarts 3 -m purestep.examples.docstrings --checkpoint state
"""

import argparse
import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree

try:
    from tqdm import tqdm

    from purestep.examples import elastic, gpt, picture
except ImportError as error:
    raise SystemExit(
        f"{error}: this example needs an extra, pip install 'purestep[examples]'"
    ) from None
from purestep.types import WeightFn

Example = dict[str, Tensor]
Batch = dict[str, Tensor]

Settings = dict[str, str | int]

CONFIG = gpt.Config()
SEED = 0


def settings_of(options: argparse.Namespace, corpus: list[bytes]) -> Settings:
    """All that decides where a run ends up: neither its ranks nor its microbatches."""
    return {
        "steps": options.steps,
        "examples": options.examples,
        "dtype": options.dtype,
        "corpus": hashlib.sha256(b"\0".join(corpus)).hexdigest()[:12],
    }


def docstrings(of: Path | None = None) -> list[bytes]:
    """The docstrings longer than a line in a folder; None: in the standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parts = ("[!_]*.py", "asyncio/*.py", "email/*.py", "json/*.py", "logging/*.py")
    files = (
        of.rglob("*.py")
        if of
        else (file for part in parts for file in stdlib.glob(part))
    )
    return [text.encode() for text in docstrings_of(files)]


def docstrings_of(files: Iterable[Path]) -> list[str]:
    """The docstrings in these files that are longer than a line, each once."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for file in files:
        nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
        for node in nodes:
            # Most of a file is expressions, and there is nothing to be found in them.
            nodes += [
                part
                for part in ast.iter_child_nodes(node)
                if not isinstance(part, ast.expr)
            ]
        found |= {ast.get_docstring(node) for node in nodes if isinstance(node, kinds)}
    return sorted(text for text in found if text and len(text) > 40)


def lengths_of(corpus: list[bytes]) -> str:
    """How many docstrings there are, and how long."""
    return f"{len(corpus)} docstrings of {min(map(len, corpus))} to {max(map(len, corpus))} bytes"


def example_of(text: bytes) -> Example:
    """Each byte but the last, and the byte that follows it; as long as the model can see."""
    data = torch.tensor(list(text[: CONFIG.context + 1]))
    return {"tokens": data[:-1], "labels": data[1:]}


def shuffled(corpus: list[bytes], generator: torch.Generator) -> Iterator[Example]:
    """Docstrings in random order, again and again."""
    while True:
        for i in torch.randperm(len(corpus), generator=generator).tolist():
            yield example_of(corpus[i])


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """The loss of each byte."""
    return ps.losses.cross_entropy(
        gpt.apply(CONFIG, params, batch["tokens"]), batch["labels"]
    )


def mean_of_means_weights(batch: Batch) -> Tensor:
    """The usual mistake as weights: however many tokens a microbatch has, together they weigh 1."""
    present = ps.label_weights(batch).to(torch.float64)
    return present / present.sum().clamp(min=1)


def sample(params: Any, prompt: str = "Return ", length: int = 160) -> str:
    """Text that continues the prompt."""
    generator = torch.Generator().manual_seed(SEED)
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


def draw(
    path: Path,
    dtype: str,
    distances: dict[str, list[float]],
    losses: dict[str, list[float]],
) -> None:
    """Distance from the large batch on the left, losses on the right."""
    colors = {
        "one large batch": "0.6",
        "mean of means": picture.ORANGE,
        "purestep": picture.BLUE,
    }
    figure, (left, right) = picture.panels(
        "‖θ − θ(one large batch)‖ / ‖θ(one large batch)‖", "Loss per byte"
    )
    steps = range(1, len(losses["purestep"]) + 1)
    for name, values in distances.items():
        left.semilogy(steps, values, color=colors[name], linewidth=1.8)
        at = (steps[-1], values[-1])
        picture.say(left, name, at, colors[name], xytext=(-4, 9), ha="right")
    rounding = torch.finfo(getattr(torch, dtype)).eps
    left.axhspan(1e-17, rounding, color="0.92")
    words = f"less than {dtype} resolves"
    picture.say(
        left, words, (steps[-1], rounding), picture.GREY, xytext=(-4, -8), ha="right"
    )
    left.set_ylim(1e-17, 3)
    for name, color in colors.items():
        width = 6 if name == "one large batch" else 1.8
        right.plot(
            steps, losses[name], color=color, linewidth=width, label=name, alpha=0.9
        )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("step")
    picture.save(figure, path)


def begin(
    options: argparse.Namespace, generator: torch.Generator
) -> tuple[ps.optim.Optimizer, Any]:
    """The optimizer, and the parameters to begin with."""
    schedule = ps.optim.warmup_cosine_decay_schedule(
        0.0, 2e-3, options.steps // 10 + 1, options.steps + 1, 3e-4
    )
    matrices = tree.map(lambda leaf: leaf.ndim > 1, gpt.init(CONFIG, generator))
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )
    return optimizer, gpt.init(CONFIG, generator, getattr(torch, options.dtype))


def compare(options: argparse.Namespace) -> None:
    """Trains three times side by side, the last two over simulated ranks; prints, draws."""
    generator = torch.Generator().manual_seed(SEED)
    corpus = docstrings(options.docstrings_of)
    print(lengths_of(corpus))

    optimizer, params = begin(options, generator)
    axis = ps.testing.ThreadAxis(options.ranks)

    def over_ranks(weight_fn: WeightFn) -> Any:
        step = axis.map(
            ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, axis=axis)
        )

        def on_rank_0(params: Any, opt_state: Any, shares: list[list[Batch]]) -> Any:
            return step([params] * axis.size, [opt_state] * axis.size, shares)[0]

        return on_rank_0

    steps = {
        "one large batch": ps.make_update_step(loss_fn, optimizer),
        "purestep": over_ranks(ps.label_weights),
        "mean of means": over_ranks(mean_of_means_weights),
    }
    # A step with weights of the mean of means reports a mean of means.
    evaluate = ps.make_eval_step(loss_fn)
    states = {name: (params, optimizer.init(params)) for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    distances: dict[str, list[float]] = {"mean of means": [], "purestep": []}

    stream = ps.group(shuffled(corpus, generator), options.examples)
    bar = tqdm(range(options.steps), unit="step")
    for _, examples in zip(bar, stream, strict=False):
        whole = ps.pack(examples, max_tokens=options.examples * CONFIG.context)
        shares = ps.balance(examples, ranks=axis.size)
        pieces = [ps.pack(share, max_tokens=options.max_tokens) for share in shares]
        for name, step in steps.items():
            losses[name].append(float(evaluate(states[name][0], whole).loss))
            group = whole if name == "one large batch" else pieces
            params, opt_state, _ = step(*states[name], group)
            states[name] = params, opt_state
        for name, values in distances.items():
            values.append(distance(states[name][0], states["one large batch"][0]))
        bar.set_postfix_str(f"loss {losses['purestep'][-1]:.3f}")

    print(f"loss {losses['purestep'][0]:.3f} -> {losses['purestep'][-1]:.3f}")
    for name, values in distances.items():
        print(
            f"distance from one large batch after {len(values)} steps, {name}: {values[-1]:.1e}"
        )
    print(sample(states["purestep"][0]))
    draw(options.picture, options.dtype, distances, losses)


class Shares(Iterator[list[Batch]]):
    """One rank's share of each group, in microbatches; the position is that of the groups."""

    def __init__(
        self, groups: ps.group, rank: int, ranks: int, max_tokens: int
    ) -> None:
        self._groups, self._rank, self._ranks, self._max_tokens = (
            groups,
            rank,
            ranks,
            max_tokens,
        )

    @property
    def position(self) -> int:
        return self._groups.position

    def __next__(self) -> list[Batch]:
        mine = ps.balance(next(self._groups), ranks=self._ranks)[self._rank]
        return ps.pack(mine, max_tokens=self._max_tokens)


def written(settings: Settings) -> dict[str, Tensor]:
    """The settings as tensors of one shape, for a checkpoint to hold."""
    texts = {name: repr(value).encode() for name, value in settings.items()}
    return {name: torch.tensor(list(text.ljust(32))) for name, text in texts.items()}


def resume(folder: Path | None, settings: Settings, begun: Any) -> Any:
    """The state that was saved last, or the state ``begun`` where none was.

    Refused are a folder that cannot be made, and a state of a run with different settings.
    """
    if folder is None:
        return begun
    folder.mkdir(exist_ok=True)
    last = ps.checkpoint.latest_checkpoint(folder)
    if last is None:
        return begun
    saved, state = ps.checkpoint.load(last, like=(written(settings), begun))
    for name, text in saved.items():
        found = ast.literal_eval(bytes(text.tolist()).decode())
        if found != settings[name]:
            raise ValueError(
                f"{folder} is of a run with {name}={found!r}, but this one has "
                f"{name}={settings[name]!r}: give it the same to go on, or name a different "
                "folder to begin anew"
            )
    return state


def fingerprint(params: Any) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all parameters: equal for equal bits."""
    digest = hashlib.sha256()
    for leaf in tree.leaves(params):
        digest.update(leaf.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def train(options: argparse.Namespace, axis: ps.MeshAxis) -> None:
    """Trains over real ranks, from the checkpoint on if there is one; rank 0 prints and saves."""
    speaks = axis.rank == 0
    generator = torch.Generator().manual_seed(SEED)
    corpus = docstrings(options.docstrings_of)
    settings = settings_of(options, corpus)

    optimizer, params = begin(options, generator)
    update_step = ps.make_update_step(
        loss_fn, optimizer, axis=axis, gather=options.shard or "step"
    )
    begun = (params, optimizer.init(params), torch.tensor(0), torch.tensor(0))
    if options.shard:
        begun = (*ps.shard(begun[:2], axis), *begun[2:])
    state = elastic.on_every_rank(lambda: resume(options.checkpoint, settings, begun))
    params, opt_state, taken, position = state
    first = int(taken)
    if speaks:
        kept = sum(leaf.nbytes for leaf in tree.leaves((params, opt_state))) / 2**20
        print(lengths_of(corpus))
        print(f"from step {first} to {options.steps} over {axis.size} ranks")
        print(f"each of them keeps {kept:.1f} MiB of state")
    losses: list[float] = []

    groups = ps.group(
        shuffled(corpus, generator), options.examples, start=int(position)
    )
    numbers = range(first + 1, options.steps + 1)
    shares = Shares(groups, axis.rank, axis.size, options.max_tokens)
    with (
        closing(ps.prefetch(shares, "cpu")) as stream,
        tqdm(
            numbers, initial=first, total=options.steps, unit="step", disable=not speaks
        ) as bar,
    ):
        for step, microbatches in zip(bar, stream, strict=False):
            params, opt_state, metrics = update_step(params, opt_state, microbatches)
            losses.append(float(metrics.loss))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            due = step % options.save_every == 0 or step == options.steps
            if options.checkpoint and due:
                # Where this step's examples end, however many more have been prefetched.
                state = (
                    params,
                    opt_state,
                    torch.tensor(step),
                    torch.tensor(stream.position),
                )
                if speaks or options.shard:
                    ps.checkpoint.save_step(
                        options.checkpoint, step, (written(settings), state)
                    )

    params = ps.unshard(params)
    if speaks:
        if losses:
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"parameters sha256 {fingerprint(params)}")
        print(sample(params))


def folder_of_python(text: str) -> Path:
    """An argument that is a folder with docstrings in it."""
    if not docstrings(Path(text)):
        raise argparse.ArgumentTypeError(
            f"{text} holds no Python file with a docstring"
        )
    return Path(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with everything refused that would stop the program later."""
    parser = picture.parser(__doc__, "docstrings", 180)
    number = partial(parser.add_argument, type=picture.positive)
    number("--examples", default=16, help="docstrings in one update")
    number("--max-tokens", default=256, help="per microbatch of a rank")
    number(
        "--ranks", default=2, help="simulated data-parallel ranks; not under torchrun"
    )
    number("--save-every", default=20, help="steps between two saves")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument(
        "--docstrings-of", type=folder_of_python, help="instead of Python's own"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to save to and to go on from"
    )
    parser.add_argument(
        "--shard", choices=["step", "microbatch"], help="gather pieces so often"
    )
    options = parser.parse_args(arguments)
    if options.max_tokens < CONFIG.context:
        parser.error(
            f"--max-tokens {options.max_tokens} has no room for an example of {CONFIG.context}"
        )
    if "RANK" not in os.environ and (options.checkpoint or options.shard):
        parser.error("--checkpoint and --shard need torchrun")
    return options


def main() -> None:
    """Trains over the ranks of ``torchrun`` if there are any, else compares simulated ones."""
    options = parse()
    try:
        if "RANK" in os.environ:
            with elastic.processes() as axis:
                train(options, axis)
            elastic.end(0)
        else:
            compare(options)
    except KeyboardInterrupt:
        saved = options.checkpoint and ps.checkpoint.latest_checkpoint(
            options.checkpoint
        )
        goes_on = (
            f"; the same command goes on from {options.checkpoint}" if saved else ""
        )
        elastic.end(130, f"interrupted{goes_on}")


if __name__ == "__main__":
    main()
