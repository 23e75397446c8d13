"""Which random losses does a compiled update compute wrong?

    python -m benchmarks.random_losses                   losses 0 to 99, a third in each way
    python -m benchmarks.random_losses 60                loss 60, in each way
    python -m benchmarks.random_losses 0 500 torch       plain torch.compile, for comparison
    python -m benchmarks.random_losses --device cuda     on an accelerator

A loss is a network of two layers and a lookup, whose output some branches read. Each branch is a chain of operations that
``OPERATIONS`` names, and ends in a sum or in the greatest value. The number of a loss is its seed. Of each loss an update is compiled by
inductor and compared with the eager one, in one of three ways:

compile=True     the step compiles what one microbatch runs
whole            ``ps.compile`` of the step
stacked          of the step with a stacked group, which is a loop in the graph

An update is wrong if it is further from that of float64 than rounding explains, which is measured: by the eager update in float32. An
error is printed too, and is no wrong result. One loss takes some seconds.
"""

import argparse
import logging
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps

ROWS = 5
NUM_INPUTS = 32  # The fewest for which a compiled loop adds four products in each pass.
WIDTH = 6
WAYS = ["compile=True", "whole", "stacked"]
SLACK = 50
"""How many times further from float64 than the eager update a compiled one may be."""
FLOOR = 1e-5
"""The distance that always counts as rounding, as a fraction of the update's length."""
SHORT = 1e-3
"""Added to the length of an update: some are zero but for rounding."""
Params = dict[str, Tensor]
Operation = Callable[[Tensor, Params], Tensor]


def _stretch(x: Tensor) -> Tensor:
    """Tells columns apart that are copies of another: the greatest of equals has no gradient."""
    return x * torch.linspace(1.0, 1.5, WIDTH, dtype=x.dtype, device=x.device)


def _assign(x: Tensor, part: Any, value: Any) -> Tensor:
    """Writes to a part of a copy."""
    y = x.clone()
    y[part] = value
    return y


def _index(x: Tensor, *columns: int) -> Tensor:
    return torch.tensor(columns, device=x.device)


def _places(number: int, x: Tensor) -> Tensor:
    return torch.arange(number, device=x.device)


def _rows(x: Tensor, *columns: int) -> Tensor:
    """Repeats indices of columns for each row."""
    return _index(x, *columns).expand(len(x), len(columns))


def _attend(x: Tensor) -> Tensor:
    heads = x.reshape(-1, 1, 3, 2)
    return functional.scaled_dot_product_attention(heads, heads.sin(), heads.cos())


def _window(x: Tensor, width: int, mode: str) -> Tensor:
    """Pads one column on each side and drops what is too much."""
    return functional.pad(x[:, None], (1, 1), mode=mode)[:, 0, :width]


ALL = slice(None)
OPERATIONS: dict[str, Operation] = {
    # Element by element.
    "sin": lambda x, p: x.sin(),
    "gelu": lambda x, p: functional.gelu(x),
    "prelu": lambda x, p: functional.prelu(x, p["b"][:1]),
    "where": lambda x, p: torch.where(x > 0, x.sin(), 0.2 * x),
    "clamp": lambda x, p: x.clamp(-1, 0.7),
    "maximum": lambda x, p: torch.maximum(x, x.roll(1, 1)),
    "masked_fill": lambda x, p: x.masked_fill(x < -0.5, 0.1),
    "double": lambda x, p: x.double().sin().to(x.dtype),
    # Along rows and columns.
    "cumsum": lambda x, p: 0.4 * x.cumsum(1),
    "cumsum of columns": lambda x, p: 0.4 * x.cumsum(0),
    "cumprod": lambda x, p: x.tanh().cumprod(1),
    "cummax": lambda x, p: x.cummax(1)[0],
    "logcumsumexp": lambda x, p: x.logcumsumexp(1),
    "softmax": lambda x, p: 2 * x.softmax(1),
    "log_softmax": lambda x, p: x.log_softmax(1),
    "layer_norm": lambda x, p: functional.layer_norm(x, (WIDTH,), p["b"], p["b"].cos()),
    "batch_norm": lambda x, p: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, p: functional.group_norm(x, 2, p["b"]),
    "normalize": lambda x, p: 2 * functional.normalize(x, dim=1),
    "amax": lambda x, p: x - x.amax(1, keepdim=True),
    "max": lambda x, p: x * x.max(1)[0][:, None].tanh(),
    "median": lambda x, p: x + x.median(1)[0][:, None],
    "kthvalue": lambda x, p: x - x.kthvalue(2, 1)[0][:, None],
    "var": lambda x, p: x / (1 + x.var(1, keepdim=True)),
    "prod": lambda x, p: x + x.tanh().prod(1, keepdim=True),
    "logsumexp": lambda x, p: x - x.logsumexp(1, keepdim=True),
    "mean of columns": lambda x, p: x - x.mean(0),
    # Other orders.
    "sort": lambda x, p: x.sort(1)[0],
    "argsort": lambda x, p: x.gather(1, x.argsort(1)),
    "topk": lambda x, p: _stretch(functional.pad(x.topk(4, 1)[0], (1, 1))),
    "flip": lambda x, p: x.flip(1),
    "roll": lambda x, p: x.roll(2, 1),
    "roll of rows": lambda x, p: x.roll(1, 0),
    "columns": lambda x, p: x[:, _index(x, 3, 1, 0, 5, 2, 4)],
    "columns, twice": lambda x, p: _stretch(x[:, _index(x, 0, 0, 1, 1, 5, 5)]),
    "index_select": lambda x, p: x.index_select(1, _index(x, 5, 4, 3, 2, 1, 0)),
    "take_along_dim": lambda x, p: torch.take_along_dim(
        x, _rows(x, 5, 4, 3, 2, 1, 0), 1
    ),
    "cat": lambda x, p: torch.cat([x[:, 4:], x[:, :4].sin()], 1),
    "stack": lambda x, p: torch.stack([x[:, :3], x[:, 3:].cos()], 2).flatten(1),
    "rotary": lambda x, p: torch.cat([-x[:, 3:], x[:, :3]], 1) * x.cos(),
    "transposed": lambda x, p: x.t().contiguous().t(),
    "swapped": lambda x, p: x.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH),
    "repeat": lambda x, p: _stretch(x.repeat(1, 2)[:, 3:9]),
    "unfold": lambda x, p: functional.pad(0.5 * x.unfold(1, 3, 1).sum(2), (1, 1)),
    "diagonal": lambda x, p: torch.einsum("bi,bj->bij", x, x.sin()).diagonal(0, 1, 2),
    "tril": lambda x, p: x.tril() + 0.1 * x,
    # Writes to parts.
    "assigned columns": lambda x, p: _assign(
        x, (ALL, _index(x, 1, 4)), x[:, 2:4].sin()
    ),
    "assigned slice": lambda x, p: _stretch(_assign(x, (ALL, slice(3)), 2 * x[:, 3:])),
    "assigned mask": lambda x, p: _assign(x, x > 0, 0.25),
    "scatter": lambda x, p: x.scatter(1, _rows(x, 1, 3), 2 * x[:, 4:]),
    "scatter_add": lambda x, p: x.scatter_add(1, _rows(x, 0, 1, 1, 3, 5, 2), x.sin()),
    "index_add": lambda x, p: x.index_add(1, _index(x, 0, 2, 2, 3, 4, 1), x.cos()),
    "index_copy": lambda x, p: _stretch(
        x.index_copy(1, _index(x, 0, 2), 0.5 * x[:, 4:])
    ),
    "index_fill": lambda x, p: x.index_fill(1, _index(x, 1), 0.5),
    "select_scatter": lambda x, p: x.select_scatter(2 * x[:, 0].sin(), 1, 3),
    "slice_scatter": lambda x, p: x.slice_scatter(x[:, :2].cos(), 1, 2, 4),
    "diagonal_scatter": lambda x, p: x.diagonal_scatter(x.diagonal().sin()),
    # Products and lookups.
    "matmul": lambda x, p: x @ p["t"],
    "linear": lambda x, p: 0.5 * functional.linear(x, p["t"], p["b"]),
    "mv": lambda x, p: x * (x @ p["b"])[:, None].tanh(),
    "bmm": lambda x, p: _stretch(
        (x.reshape(-1, 2, 3) @ x.reshape(-1, 3, 2)).flatten(1).repeat(1, 2)[:, :WIDTH]
    ),
    "attention": lambda x, p: _stretch(_attend(x).flatten(1)),
    "embedding": lambda x, p: x + functional.embedding(_places(len(x), x), p["e"]),
    "embedding, by sign": lambda x, p: x * p["e"][(x > 0).sum(1)],
    "cdist": lambda x, p: 0.4 * torch.cdist(x, p["e"][:WIDTH]),
    # Of pictures.
    "conv1d": lambda x, p: functional.conv1d(x[:, None], p["k"], padding=1).sum(1),
    "max_pool1d": lambda x, p: _stretch(
        functional.max_pool1d(x[:, None], 3, 1, 1)[:, 0]
    ),
    "avg_pool1d": lambda x, p: functional.avg_pool1d(x[:, None], 3, 1, 1)[:, 0],
    "reflected": lambda x, p: _window(x, WIDTH, "reflect"),
    "circular": lambda x, p: _window(x, WIDTH, "circular"),
    "interpolated": lambda x, p: functional.interpolate(
        x[:, None], size=9, mode="linear"
    )[:, 0, :WIDTH],
    "nearest": lambda x, p: _stretch(
        functional.interpolate(x[:, None], size=4)[:, 0, _places(WIDTH, x) % 4]
    ),
}

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "squares": lambda x: x.square().sum(1),
    "column": lambda x: x[:, 1],
    "greatest": lambda x: x.amax(1),
}


class Loss(NamedTuple):
    """Names the operations before the branches, those of each branch, and the branches' ends."""

    head: list[str]
    branches: list[list[str]]
    ends: list[str]


def draw_loss(seed: int) -> Loss:
    """Draws two to four branches of at most four operations."""
    generator = random.Random(seed)

    def draw(least: int, most: int) -> list[str]:
        return generator.choices([*OPERATIONS], k=generator.randint(least, most))

    head = draw(0, 2)
    branches = [draw(1, 4) for _ in range(generator.randint(2, 4))]
    return Loss(head, branches, generator.choices([*ENDS], k=len(branches)))


def make_loss_fn(loss: Loss) -> Callable[[Params, Any], Tensor]:
    """Makes the loss of each row."""

    def loss_fn(params: Params, microbatch: Any) -> Tensor:
        hidden = (microbatch["x"] @ params["w"] + params["b"]).tanh() @ params["t"]
        x = hidden + functional.embedding(microbatch["ids"], params["e"])
        for name in loss.head:
            x = OPERATIONS[name](x, params)
        losses = x.new_zeros(len(x))
        for branch, end in zip(loss.branches, loss.ends, strict=True):
            y = x
            for name in branch:
                y = OPERATIONS[name](y, params)
            losses = losses + ENDS[end](y)
        return losses

    return loss_fn


def make_case(dtype: torch.dtype, device: str = "cpu") -> tuple[Params, list[Any]]:
    """Draws parameters, one of which no loss reads, and two microbatches."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        # In float64 and on each device the same numbers.
        return torch.randn(*shape, generator=generator).to(device, dtype)

    params = {
        "w": 2 * NUM_INPUTS**-0.5 * normal(NUM_INPUTS, WIDTH),
        "b": normal(WIDTH),
        "t": 0.5 * normal(WIDTH, WIDTH),
        "e": normal(9, WIDTH),
        "k": normal(2, 1, 3),
        "unread": normal(WIDTH),
    }
    group = []
    for _ in range(2):
        ids = torch.randint(9, (ROWS,), generator=generator).to(device)
        group.append({"x": normal(ROWS, NUM_INPUTS), "ids": ids})
    return params, group


def weigh(batch: Any) -> Tensor:
    """Counts each row."""
    return torch.ones(len(batch["x"]), device=batch["x"].device)


def update(
    loss: Loss, way: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Params:
    """Returns by how much one update by SGD moves the parameters. ``"eager"`` compiles nothing."""
    params, group = make_case(dtype, device)
    sgd = ps.optim.sgd(1.0)
    settings: dict[str, Any] = {"weight_fn": weigh}
    if way == "compile=True":
        settings["compile"] = True
    if way == "torch":
        settings["compile"] = torch.compile
    step: Any = ps.make_update_step(make_loss_fn(loss), sgd, **settings)
    if way in ("whole", "stacked"):
        step = ps.compile(step, fullgraph=True)
    torch.compiler.reset()
    microbatches = ps.stack(group) if way == "stacked" else group
    new_params, *_ = step(params, sgd.init(params), microbatches)
    return {name: new_params[name] - params[name] for name in params}


def judge(exact: Params, eager: Params, compiled: Params) -> tuple[float, bool]:
    """Returns how far a compiled update is from that of float64, and whether that is too far.

    The distance is that of the worst parameter, in parts of the update of all.
    """
    length = torch.stack([moved.norm() for moved in exact.values()]).norm().item()

    def distance(update: Params) -> float:
        apart = [(update[name].double() - exact[name]).norm() for name in exact]
        return torch.stack(apart).max().item() / (length + SHORT)

    allowed = max(SLACK * distance(eager), FLOOR)
    # Not "greater than": NaN is wrong.
    return distance(compiled), not distance(compiled) <= allowed


def compare(loss: Loss, way: str, device: str = "cpu") -> tuple[float, bool]:
    """Takes an update three times, and judges the compiled one."""
    exact = update(loss, "eager", torch.float64, device)
    eager = update(loss, "eager", device=device)
    return judge(exact, eager, update(loss, way, device=device))


def main() -> int:
    """Prints wrong updates and errors; returns 1 if there are wrong ones."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("first", nargs="?", type=int)
    parser.add_argument("last", nargs="?", type=int, help="not among them")
    parser.add_argument("way", nargs="?", choices=[*WAYS, "torch"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # A loss that no compiler runs is an error here, not an eager update that is right.
    warnings.filterwarnings("error", message=".*cannot make one graph")
    first, last = options.first, options.last
    if first is None:
        first, last = 0, 100
    if last is None:
        last = first + 1
    num_wrong = num_errors = num_updates = 0
    for seed in range(first, last):
        loss = draw_loss(seed)
        ways = WAYS if last == first + 1 else [WAYS[seed % len(WAYS)]]
        for way in [options.way] if options.way else ways:
            num_updates += 1
            try:
                distance, is_wrong = compare(loss, way, options.device)
            except Exception as error:
                num_errors += 1
                text = " ".join(str(error).split())
                print(f"{seed} {way}: {type(error).__name__}: {text:.200}; {loss}")
                continue
            num_wrong += is_wrong
            if is_wrong or last == first + 1:
                print(f"{seed} {way}: {distance:.1e} of the update away; {loss}")
            sys.stdout.flush()
    print(f"{num_wrong} wrong and {num_errors} errors among {num_updates} updates")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
