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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.data import Groups

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

Curves = dict[str, list[float]]
"""For each way to train, a value for each step."""

LARGE_BATCH = "one large batch"
MEAN_OF_MEANS = "mean of means"
PURESTEP = "purestep"


def collect_settings(options: argparse.Namespace, corpus: list[bytes]) -> Settings:
    """Collects the settings that decide where a run ends; ranks and microbatch sizes do not.

    These are the ``steps``, ``examples`` and ``dtype`` of the options, and a hash of the corpus.
    """
    digest = hashlib.sha256(b"\0".join(corpus))
    return {
        "steps": options.steps,
        "examples": options.examples,
        "dtype": options.dtype,
        "corpus": digest.hexdigest()[:12],
    }


def load_corpus(folder: Path | None = None) -> list[bytes]:
    """Reads docstrings, as ``extract_docstrings`` returns them, and encodes them as UTF-8.

    They are of all Python files under the folder, or, for None, of part of the standard library.
    """
    if folder is not None:
        files = list(folder.rglob("*.py"))
    else:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        files = list(stdlib.glob("[!_]*.py"))
        for package in ("asyncio", "email", "json", "logging"):
            files += stdlib.glob(f"{package}/*.py")
    return [text.encode() for text in extract_docstrings(files)]


def extract_docstrings(files: Iterable[Path]) -> list[str]:
    """Extracts the docstrings of more than 40 characters from Python files: each once, sorted.

    Raises ``SyntaxError`` for a file that does not parse.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = set()
    for file in files:
        module = ast.parse(file.read_bytes())
        pending: list[ast.AST] = [module]
        while pending:
            node = pending.pop()
            if isinstance(node, documented):
                texts.add(ast.get_docstring(node) or "")
            for child in ast.iter_child_nodes(node):
                # Most of a file is expressions, and they have no docstrings.
                if not isinstance(child, ast.expr):
                    pending.append(child)
    long_texts = [text for text in texts if len(text) > 40]
    return sorted(long_texts)


def describe_corpus(corpus: list[bytes]) -> str:
    """Returns a text with the number of docstrings, and the lengths of the shortest and longest."""
    lengths = [len(text) for text in corpus]
    shortest = min(lengths)
    longest = max(lengths)
    return f"{len(corpus)} docstrings of {shortest} to {longest} bytes"


def make_example(text: bytes) -> Example:
    """Makes an example of a text: its bytes as ``tokens``, and the byte after each as ``labels``.

    The last byte is a label alone. A text of more than ``CONFIG.context + 1`` bytes is cut to that
    length.
    """
    length = CONFIG.context + 1
    data = torch.tensor(list(text[:length]))
    tokens = data[:-1]
    labels = data[1:]
    return {"tokens": tokens, "labels": labels}


def shuffle_forever(
    corpus: list[bytes], generator: torch.Generator
) -> Iterator[Example]:
    """Yields an example of each docstring in random order, then all in another, without end."""
    while True:
        order = torch.randperm(len(corpus), generator=generator)
        for i in order.tolist():
            yield make_example(corpus[i])


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """Computes the loss of each byte."""
    logits = gpt.apply(CONFIG, params, batch["tokens"])
    return ps.losses.cross_entropy(logits, batch["labels"])


def mean_of_means_weights(batch: Batch) -> Tensor:
    """Returns the weights of a microbatch divided by their sum: each microbatch counts as 1.

    That is the usual mistake. A microbatch without tokens counts as 0. The weights are float64.
    """
    weights = ps.label_weights(batch).to(torch.float64)
    return weights / weights.sum().clamp(min=1)


def generate_text(params: Any, prompt: str = "Return ", length: int = 160) -> str:
    """Returns a text: the prompt, and ``length`` bytes that the model samples with a fixed seed."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = list(prompt.encode())
    for _ in range(length):
        context = torch.tensor([tokens[-CONFIG.context :]])
        logits = gpt.apply(CONFIG, params, context)
        scores = logits[0, -1] / 0.7
        probabilities = torch.softmax(scores, -1)
        token = torch.multinomial(probabilities, 1, generator=generator)
        tokens.append(int(token))
    return bytes(tokens).decode(errors="replace")


def relative_distance(params: Any, reference: Any) -> float:
    """Computes ‖θ − θ*‖ / ‖θ*‖ over all leaves."""
    difference = tree.map(torch.sub, params, reference)
    distance = tree.global_norm(difference) / tree.global_norm(reference)
    return float(distance)


COLORS = {
    MEAN_OF_MEANS: picture.ORANGE,
    PURESTEP: picture.BLUE,
}


def print_results(losses: Curves, distances: Curves) -> None:
    """Prints purestep's first and last loss, and how far both runs end from one with one batch."""
    first = losses[PURESTEP][0]
    last = losses[PURESTEP][-1]
    print(f"loss {first:.3f} -> {last:.3f}")
    for name, values in distances.items():
        print(
            f"distance from one large batch after {len(values)} steps, {name}: "
            f"{values[-1]:.1e}"
        )


def plot_distances(axes: Any, distances: Curves, dtype: torch.dtype) -> None:
    """Plots distances from the run with one batch, and the resolution of the dtype."""
    for name, values in distances.items():
        color = COLORS[name]
        steps = range(1, len(values) + 1)
        picture.plot_line(axes, steps, values, color)
        picture.annotate_end(axes, name, steps, values, color, shift=(-4, 20))
    resolution = torch.finfo(dtype).eps
    dtype_name = str(dtype).removeprefix("torch.")
    axes.axhspan(1e-17, resolution, color="0.92")
    picture.annotate(
        axes,
        f"less than {dtype_name} resolves",
        (steps[-1], resolution),
        picture.GREY,
        shift=(-4, -8),
        ha="right",
    )
    axes.set_yscale("log")
    axes.set_ylim(1e-17, 1e2)
    axes.set_xlabel("step", fontsize=picture.FONT_SIZE)


def loss_distances(losses: Curves) -> Curves:
    """Computes the relative distance of each step's loss from that of the run with one batch.

    The other runs are the mean of means and purestep.
    """
    distances = {}
    for name in (MEAN_OF_MEANS, PURESTEP):
        pairs = zip(losses[name], losses[LARGE_BATCH], strict=True)
        distances[name] = [abs(loss - other) / other for loss, other in pairs]
    return distances


def make_optimizer_and_params(
    options: argparse.Namespace, generator: torch.Generator
) -> tuple[ps.optim.Optimizer, Any]:
    """Makes an optimizer for ``options.steps`` updates, and params in ``options.dtype``."""
    learning_rate = ps.optim.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=2e-3,
        warmup_steps=options.steps // 10 + 1,
        decay_steps=options.steps + 1,
        end_value=3e-4,
    )
    template = gpt.init(CONFIG, generator)
    adamw = ps.optim.adamw(
        learning_rate,
        b2=0.95,
        weight_decay=0.1,
        mask=tree.map(lambda leaf: leaf.ndim > 1, template),
    )
    clip = ps.optim.clip_by_global_norm(1.0)
    optimizer = ps.optim.chain(clip, adamw)
    dtype = getattr(torch, options.dtype)
    return optimizer, gpt.init(CONFIG, generator, dtype)


def make_simulated_step(
    axis: ps.testing.ThreadAxis,
    optimizer: ps.optim.Optimizer,
    weight_fn: WeightFn,
) -> Callable[..., Any]:
    """Makes ``step(params, opt_state, shares)``, an update step over simulated ranks.

    ``shares`` lists the microbatches of each rank. All ranks begin at the same params and state. It
    returns what the step of rank 0 returns.
    """
    step_on_rank = ps.make_update_step(
        loss_fn, optimizer, weight_fn=weight_fn, axis=axis
    )
    step_on_ranks = axis.map(step_on_rank)

    def step(params: Any, opt_state: Any, shares: list[list[Batch]]) -> Any:
        every_params = [params] * axis.size
        every_state = [opt_state] * axis.size
        results = step_on_ranks(every_params, every_state, shares)
        return results[0]

    return step


def compare(options: argparse.Namespace) -> None:
    """Trains three times side by side, twice over simulated ranks; prints the results and a sample.

    Saves a picture of how far the runs are apart.
    """
    generator = torch.Generator().manual_seed(SEED)
    corpus = load_corpus(options.docstrings_of)
    print(describe_corpus(corpus))

    optimizer, params = make_optimizer_and_params(options, generator)
    axis = ps.testing.ThreadAxis(options.ranks)
    steps = {
        LARGE_BATCH: ps.make_update_step(loss_fn, optimizer),
        MEAN_OF_MEANS: make_simulated_step(axis, optimizer, mean_of_means_weights),
        PURESTEP: make_simulated_step(axis, optimizer, ps.label_weights),
    }
    # metrics.loss would not do: a step with weights of the mean of means reports a mean of means.
    evaluate = ps.make_eval_step(loss_fn)
    start = (params, optimizer.init(params))
    states = dict.fromkeys(steps, start)
    losses: Curves = {name: [] for name in steps}
    distances: Curves = {MEAN_OF_MEANS: [], PURESTEP: []}

    examples = shuffle_forever(corpus, generator)
    groups = ps.group(examples, options.examples)
    max_large = options.examples * CONFIG.context
    bar = tqdm(range(options.steps), unit="step")
    for _, group in zip(bar, groups, strict=False):
        large_batch = ps.pack(group, max_tokens=max_large)
        shares = [
            ps.pack(share, max_tokens=options.max_tokens)
            for share in ps.balance(group, ranks=axis.size)
        ]
        for name, step in steps.items():
            params, opt_state = states[name]
            metrics = evaluate(params, large_batch)
            losses[name].append(float(metrics.loss))
            microbatches = large_batch if name == LARGE_BATCH else shares
            params, opt_state, _ = step(params, opt_state, microbatches)
            states[name] = (params, opt_state)
        reference, _ = states[LARGE_BATCH]
        for name, values in distances.items():
            params, _ = states[name]
            values.append(relative_distance(params, reference))
        bar.set_postfix_str(f"loss {losses[PURESTEP][-1]:.3f}")

    print_results(losses, distances)
    params, _ = states[PURESTEP]
    print(generate_text(params))
    figure, (left_axes, right_axes) = picture.make_panels(
        "Parameters: relative distance\nfrom the run with one batch",
        "Loss: relative distance\nfrom the run with one batch",
    )
    dtype = getattr(torch, options.dtype)
    plot_distances(left_axes, distances, dtype)
    plot_distances(right_axes, loss_distances(losses), dtype)
    picture.save(figure, options.picture)


class RankShares(Iterator[list[Batch]]):
    """Yields this rank's share of each group, packed into microbatches.

    ``position`` is that of ``groups``, from which a later run can go on.
    """

    def __init__(self, groups: Groups, axis: ps.MeshAxis, max_tokens: int) -> None:
        self._groups = groups
        self._axis = axis
        self._max_tokens = max_tokens

    @property
    def position(self) -> int:
        return self._groups.position

    def __next__(self) -> list[Batch]:
        group = next(self._groups)
        shares = ps.balance(group, ranks=self._axis.size)
        share = shares[self._axis.rank]
        return ps.pack(share, max_tokens=self._max_tokens)


def encode_settings(settings: Settings) -> dict[str, Tensor]:
    """Encodes each setting as a tensor for a checkpoint: the bytes of its ``repr``, at least 32.

    Spaces pad a shorter one.
    """
    encoded = {}
    for name, value in settings.items():
        text = repr(value).encode().ljust(32)
        encoded[name] = torch.tensor(list(text))
    return encoded


def read_settings(encoded: dict[str, Tensor]) -> Settings:
    """Decodes the settings that ``encode_settings`` encoded."""
    settings: Settings = {}
    for name, tensor in encoded.items():
        text = bytes(tensor.tolist()).decode()
        settings[name] = ast.literal_eval(text)
    return settings


def resume(folder: Path | None, settings: Settings, start: Any) -> Any:
    """Loads the last state saved in a folder; returns ``start`` for None or a folder without one.

    Makes the folder if it is missing, but not its parents. Raises ``OSError`` if it cannot, and
    ``ValueError`` for a state of a run with different settings.
    """
    if folder is None:
        return start
    folder.mkdir(exist_ok=True)
    latest = ps.checkpoint.latest_checkpoint(folder)
    if latest is None:
        return start
    like = (encode_settings(settings), start)
    encoded, state = ps.checkpoint.load(latest, like=like)
    for name, saved in read_settings(encoded).items():
        if saved != settings[name]:
            raise ValueError(
                f"{folder} is of a run with {name}={saved!r}, but this one has "
                f"{name}={settings[name]!r}: give it the same to go on, or name a "
                "different folder to begin anew"
            )
    return state


def hash_params(params: Any) -> str:
    """Returns the first 12 hexadecimal digits of the SHA-256 of all leaves' bits.

    The leaves must be on the host.
    """
    digest = hashlib.sha256()
    for leaf in tree.leaves(params):
        array = leaf.contiguous().numpy()
        digest.update(array.tobytes())
    return digest.hexdigest()[:12]


def count_mebibytes(state: Any) -> float:
    """Returns the memory of a tree's leaves on this rank, in MiB."""
    leaves = tree.leaves(state)
    num_bytes: int = sum(leaf.nbytes for leaf in leaves)
    return num_bytes / 2**20


def train(options: argparse.Namespace, axis: ps.MeshAxis) -> None:
    """Trains over real ranks, from the last checkpoint on if there is one; rank 0 prints.

    Saves every ``options.save_every`` steps and at the end, if ``options.checkpoint`` is set. All
    ranks save sharded state; rank 0 alone saves full tensors.
    """
    is_main = axis.rank == 0
    generator = torch.Generator().manual_seed(SEED)
    corpus = load_corpus(options.docstrings_of)
    settings = collect_settings(options, corpus)

    optimizer, params = make_optimizer_and_params(options, generator)
    opt_state = optimizer.init(params)
    if options.shard:
        params, opt_state = ps.shard((params, opt_state), axis)
    state = (params, opt_state, torch.tensor(0), torch.tensor(0))
    params, opt_state, step, position = elastic.run_or_exit_together(
        lambda: resume(options.checkpoint, settings, state)
    )
    num_done = int(step)
    if is_main:
        print(describe_corpus(corpus))
        print(f"from step {num_done} to {options.steps} over {axis.size} ranks")
        mebibytes = count_mebibytes((params, opt_state))
        print(f"each of them keeps {mebibytes:.1f} MiB of state")

    update_step = ps.make_update_step(
        loss_fn, optimizer, axis=axis, gather=options.shard or "step"
    )
    examples = shuffle_forever(corpus, generator)
    groups = ps.group(examples, options.examples, start=int(position))
    shares = RankShares(groups, axis, options.max_tokens)
    bar = tqdm(
        range(num_done + 1, options.steps + 1),
        initial=num_done,
        total=options.steps,
        unit="step",
        disable=not is_main,
    )
    losses: list[float] = []
    with closing(ps.prefetch(shares, "cpu")) as stream, bar:
        for step, microbatches in zip(bar, stream, strict=False):
            params, opt_state, metrics = update_step(params, opt_state, microbatches)
            losses.append(float(metrics.loss))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            is_due = step % options.save_every == 0 or step == options.steps
            # All ranks save shards; full tensors are saved by rank 0 alone.
            if options.checkpoint and is_due and (is_main or options.shard):
                # Where this step's examples end, however many more have been prefetched.
                position = torch.tensor(stream.position)
                state = (params, opt_state, torch.tensor(step), position)
                ps.checkpoint.save_step(
                    options.checkpoint, step, (encode_settings(settings), state)
                )

    params = ps.unshard(params)
    if is_main:
        if losses:
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"parameters sha256 {hash_params(params)}")
        print(generate_text(params))


def python_folder(text: str) -> Path:
    """Parses a folder for ``argparse``; raises its error if there are no docstrings in it.

    The docstrings are those of ``load_corpus``, which raises ``SyntaxError`` for a broken file.
    """
    folder = Path(text)
    if not load_corpus(folder):
        raise argparse.ArgumentTypeError(
            f"{text} holds no Python file with a docstring"
        )
    return folder


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line, and exits on options that do not fit together.

    ``arguments`` of None are those of the program.
    """
    parser = picture.make_parser(__doc__, "docstrings", 180)
    for name, default, text in [
        ("--examples", 16, "docstrings in one update"),
        ("--max-tokens", 256, "per microbatch of a rank"),
        ("--ranks", 2, "simulated data-parallel ranks; not under torchrun"),
        ("--save-every", 20, "steps between two saves"),
    ]:
        parser.add_argument(name, type=picture.positive_int, default=default, help=text)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument(
        "--docstrings-of", type=python_folder, help="instead of Python's own"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to save to and to go on from"
    )
    parser.add_argument(
        "--shard",
        choices=["step", "microbatch"],
        help="shard the state, and gather the parameters once for each of these",
    )
    options = parser.parse_args(arguments)
    if options.max_tokens < CONFIG.context:
        parser.error(
            f"--max-tokens {options.max_tokens} has no room for an example of "
            f"{CONFIG.context}"
        )
    if "RANK" not in os.environ and (options.checkpoint or options.shard):
        parser.error("--checkpoint and --shard need torchrun")
    return options


def main() -> None:
    """Trains over the ranks of ``torchrun`` if there are any, else compares simulated ones.

    Under ``torchrun`` it ends the process with code 0 after training, or with code 1 if ``resume``
    fails. An interrupt ends it with code 130.
    """
    options = parse_options()
    try:
        if "RANK" in os.environ:
            with elastic.join_processes() as axis:
                train(options, axis)
            elastic.exit_now(0)
        else:
            compare(options)
    except KeyboardInterrupt:
        message = "interrupted"
        if options.checkpoint and ps.checkpoint.latest_checkpoint(options.checkpoint):
            message += f"; the same command goes on from {options.checkpoint}"
        elastic.exit_now(130, message)


if __name__ == "__main__":
    main()
