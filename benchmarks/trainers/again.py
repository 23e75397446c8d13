"""Each cell that says wrong, computed again without the kit: sums of plain losses, times one coefficient for each microbatch.

Whatever a trainer does, its gradient is Σ cₖ ∇Sₖ, where Sₖ is the sum of the losses that count in microbatch k. The equation has
cₖ = 1 / N; each trainer has a formula below. It is right that a cell says wrong if three things hold on the smallest case found:
the equation gives the same for both ways to write the update, the trainer's numbers are those of its formula, and its two differ,
or differ from the equation.

    python -m benchmarks.trainers.again
"""

import copy
import hashlib
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.trainers.by_hand import CASES, FIRST
from benchmarks.trainers.columns import COLUMNS

Data = dict[str, Tensor]


class Part(NamedTuple):
    """A microbatch: the sum of its losses, how many count, how many rows and labels it has, and the same for each row.

    ``unshifted``: how many labels it has where none is taken for granted.
    """

    loss: Any
    counts: float
    rows: int
    labels: float
    each: Sequence[tuple[Any, float]]
    unshifted: float


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """One for each place; 0 where the label is -100."""
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none"
    ).view(labels.shape)


def regression(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """Squared errors, and their weights."""
    weight, bias = model
    return (data["x"] @ weight + bias - data["y"]) ** 2, data["w"]


def labels(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """Of a model that returns logits."""
    return cross_entropies(model(data["input_ids"]), data["labels"]), data[
        "labels"
    ] != -100


def _logits(model: Any, data: Data, key: str = "input_ids") -> Tensor:
    logits: Tensor = model(
        input_ids=data[key], attention_mask=data["attention_mask"]
    ).logits
    return logits


def next_tokens(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """Labels of the next place."""
    wanted = data["labels"][:, 1:]
    return cross_entropies(_logits(model, data)[:, :-1], wanted), wanted != -100


def classes_of_tokens(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """Labels of this place."""
    return cross_entropies(_logits(model, data), data["labels"]), data["labels"] != -100


def classes_of_rows(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """The sum of a row's labels, modulo 3."""
    counts = data["labels"] != -100
    wanted = torch.where(counts.any(1), (data["labels"] * counts).sum(1) % 3, -100)[
        :, None
    ]
    return cross_entropies(_logits(model, data)[:, None], wanted), wanted != -100


def next_of_logits(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """Labels of the next place, of a model that returns logits."""
    wanted = data["labels"][:, 1:]
    return cross_entropies(model(data["input_ids"])[:, :-1], wanted), wanted != -100


def asft(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """p · (-log p) + 0.1 KL(q ‖ π), with p in front as a constant, and a uniform q."""
    logits, wanted = _logits(model, data)[:, :-1], data["labels"][:, 1:]
    each = cross_entropies(logits, wanted)
    kl = -logits.log_softmax(-1).mean(-1) - math.log(logits.shape[-1])
    return each * (-each).exp().detach() + 0.1 * kl, wanted != -100


def completions(model: Any, data: Data, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Next tokens from a row's first label on; with ``pad`` one more behind its end, as mlx-lm has it, a 0."""
    ids = F.pad(data["input_ids"], (0, 1))
    lengths = data["attention_mask"].sum(1, keepdim=True)
    counts = data["labels"] != -100
    starts = torch.where(counts.any(1), counts.int().argmax(1), lengths[:, 0])[:, None]
    places = torch.arange(1, ids.shape[1])[None]
    return cross_entropies(model(ids[:, :-1]), ids[:, 1:]), (places >= starts) & (
        places < lengths + pad
    )


def policy(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """-A π / π', with A = -(first token modulo 3, and 1)."""
    logs = -cross_entropies(_logits(model, data)[:, :-1], data["input_ids"][:, 1:])
    ratios = (logs - logs.detach()).exp()
    return ratios * (data["input_ids"][:, :1] % 3 + 1), data["labels"][:, 1:] != -100


def preferences(model: Any, data: Data) -> tuple[Tensor, Tensor]:
    """-log σ(β Δ), against the same policy, where the other row has each token moved on by one."""
    counts, ids = data["labels"][:, 1:] != -100, data["input_ids"]
    other = {**data, "other": torch.cat([ids[:, :1], (ids[:, 1:] + 1) % 5], 1)}
    chosen = -cross_entropies(_logits(model, data)[:, :-1], ids[:, 1:])
    rejected = -cross_entropies(
        _logits(model, other, "other")[:, :-1], other["other"][:, 1:]
    )
    margin = ((chosen - rejected) * counts).sum(1, keepdim=True)
    return -F.logsigmoid(0.1 * (margin - margin.detach())), counts.any(1, keepdim=True)


LOSSES: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "regression": regression,
    "labels of tokens": labels,
    "next tokens": next_tokens,
    "classes of tokens": classes_of_tokens,
    "classes of rows": classes_of_rows,
    "completions": completions,
    "policy gradient": policy,
    "preferences": preferences,
    "next tokens of logits": next_of_logits,
    "asft": asft,
}


def part(task: str, model: Any, data: Data, pad: int = 0) -> Part:
    """The sums of a microbatch."""
    more = {"pad": pad} if task == "completions" else {}
    losses, counts = LOSSES[task](model, data, **more)
    counts = counts.to(losses.dtype)
    # A loss that does not count may be anything.
    weighted = torch.where(counts > 0, losses * counts, torch.zeros_like(losses))
    shifted = data["labels"][:, 1:] != -100 if "labels" in data else torch.zeros(0)
    # torchtune's text data sets have a label at the first place of each row in which one counts.
    labels = float(shifted.sum() + (shifted.any(1).sum() if "labels" in data else 0))
    unshifted = float((data["labels"] != -100).sum()) if "labels" in data else 0.0
    each = list(zip(weighted.sum(1), counts.sum(1).tolist(), strict=True))
    return Part(
        weighted.sum(), float(counts.sum()), len(losses), labels, each, unshifted
    )


def marked(state: Any) -> str:
    """A mark of a generator's state."""
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _over(number: float, by: float) -> float:
    return number / by if by else 0.0


def equation(parts: Sequence[Part]) -> Any:
    """Σ Sₖ / N."""
    total = sum(p.counts for p in parts)
    return sum(p.loss for p in parts) / total if total else 0.0


def mean_of_means(parts: Sequence[Part]) -> Any:
    """cₖ = 1 / (K nₖ); a microbatch without labels has the gradient 0, and counts in K."""
    return sum(p.loss * _over(1 / len(parts), p.counts) for p in parts)


def sum_of_means(parts: Sequence[Part]) -> Any:
    """cₖ = 1 / nₖ."""
    return sum(p.loss * _over(1, p.counts) for p in parts)


def by_rows(parts: Sequence[Part]) -> Any:
    """cₖ = rₖ / (R nₖ), with rₖ rows in the microbatch and R in all."""
    rows = sum(p.rows for p in parts)
    return sum(p.loss * _over(p.rows / rows, p.counts) for p in parts)


def by_labels(parts: Sequence[Part]) -> Any:
    """cₖ = lₖ / (nₖ L), with lₖ labels before the shift and L in all; 0 / 0 where there is none."""
    total = sum(p.labels for p in parts)
    if not total:
        return sum(p.loss for p in parts) * math.nan
    return sum(p.loss * _over(p.labels / total, p.counts) for p in parts)


def by_predictions(parts: Sequence[Part]) -> Any:
    """Σ Sₖ / N; 0 / 0 where there is none."""
    if not any(p.counts for p in parts):
        return sum(p.loss for p in parts) * math.nan
    return equation(parts)


def by_unshifted(parts: Sequence[Part]) -> Any:
    """Σ Sₖ / U, with U labels before the shift."""
    unshifted = sum(p.unshifted for p in parts)
    return sum(p.loss for p in parts) / unshifted if unshifted else 0.0


def means_of_rows(parts: Sequence[Part]) -> Any:
    """The mean over all rows of their means."""
    rows = [row for p in parts for row in p.each]
    return sum(loss * _over(1 / len(rows), count) for loss, count in rows)


def means_or_nothing(parts: Sequence[Part]) -> Any:
    """As ``mean_of_means``, but that a microbatch without labels is 0 / 0."""
    if not all(p.counts for p in parts):
        return sum(p.loss for p in parts) * math.nan
    return mean_of_means(parts)


def sums_or_nothing(parts: Sequence[Part]) -> Any:
    """As ``sum_of_means``, but that a microbatch without labels is 0 / 0."""
    if not all(p.counts for p in parts):
        return sum(p.loss for p in parts) * math.nan
    return sum_of_means(parts)


FORMULAS: Mapping[str, Callable[[Sequence[Part]], Any]] = {
    "equation": equation,
    "mean of means": mean_of_means,
    "sum of means": sum_of_means,
    "mean of means that are there": lambda parts: mean_of_means(
        [p for p in parts if p.counts]
    ),
    "sums": equation,
    "predictions": by_predictions,
    "unshifted labels": by_unshifted,
    "rows": by_rows,
    "labels": by_labels,
    "row means": means_of_rows,
    "mlx": means_or_nothing,
    "asft": sums_or_nothing,
    "rank means": equation,
    "evaluation": equation,
    "first call": equation,
}


def after(
    case: Mapping[str, Any],
    run: Mapping[str, Any],
    model: Any,
    gives: str,
    *,
    filtered: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and the last loss, or what it may be, after a run, in float64: SGD by the gradient of a formula.

    An update in which nothing counts is left out by the equation; the others step by a gradient of zero. ``filtered``: where a loss is no
    number, transformers' Trainer adds the sum so far instead (logging_nan_inf_filter), and it draws the order of the microbatches.
    """
    formula, task = FORMULAS[gives], case["task"]
    params = dict(model) if isinstance(model, dict) else dict(model.named_parameters())
    leaves = {name: p.detach().double().requires_grad_() for name, p in params.items()}
    moments = {name: torch.zeros_like(p) for name, p in leaves.items()}
    values: list[float] = []
    first_call = True
    for act in run["acts"]:
        if act == "restart":
            first_call = True
        if isinstance(act, str):
            continue
        ranks = [[_tensors(each) for each in share] for share in act]
        if not isinstance(model, dict):
            module = copy.deepcopy(model).double().eval()

            def called(
                *args: Any, leaves: Any = leaves, module: Any = module, **more: Any
            ) -> Any:
                return torch.func.functional_call(module, leaves, args, more)

            at: Any = called
        else:
            at = leaves["weight"], leaves["bias"]
        parts = [
            [part(task, at, each, int(gives == "mlx")) for each in share]
            for share in ranks
        ]
        everything = [each for share in parts for each in share]
        counted = sum(each.counts for each in everything)
        if gives in ("equation", "evaluation", "first call", "sums"):
            total = equation(everything)
        else:
            total = sum(formula(share) for share in parts if share) / len(parts)
        if not everything or (gives in ("equation", "first call") and not counted):
            continue
        value = float(total.detach()) if isinstance(total, Tensor) else total
        values = [value]
        if filtered and len(everything) < 7:
            over = len(everything) if gives == "mean of means" else 1
            values = [
                _filtered(order, over) for order in itertools.permutations(everything)
            ]
        if math.isnan(value):
            # 0 / 0 spreads from here to all that the loss or the scale reaches.
            return {name: torch.full_like(p, math.nan) for name, p in leaves.items()}, [
                math.nan
            ]
        grads = (
            torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
            if isinstance(total, Tensor)
            else [None] * len(leaves)
        )
        for (name, p), grad in zip([*leaves.items()], grads, strict=True):
            grad = (torch.zeros_like(p) if grad is None else grad) + case[
                "weight_decay"
            ] * p
            fresh = gives == "first call" and first_call
            moments[name] = (1 if fresh else case["momentum"]) * moments[name] + grad
            leaves[name] = (
                (p - case["learning_rate"] * moments[name]).detach().requires_grad_()
            )
        first_call = False
    return {name: p.detach() for name, p in leaves.items()}, values


def _filtered(parts: Sequence[Part], over: float) -> float:
    value = 0.0
    for each in parts:
        loss = float(each.loss.detach()) / over
        value += loss / each.counts if each.counts else value
    return value


def evaluated(
    case: Mapping[str, Any], run: Mapping[str, Any], model: Any, params: Any
) -> float:
    """transformers' mean over the means of batches, each of which it repeats as often as a full batch has rows."""
    module = copy.deepcopy(model).double().eval()

    def at(**more: Any) -> Any:
        return torch.func.functional_call(module, params, (), more)

    parts = [part(case["task"], at, _tensors(each)) for each in run["acts"][-1][0]]
    return float(mean_of_means(parts))


def _tensors(lists: Mapping[str, Any]) -> Data:
    out = {key: torch.tensor(value) for key, value in lists.items()}
    return {key: x.double() if x.is_floating_point() else x for key, x in out.items()}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of two sets of parameters; infinite where one alone is no number."""
    worst = 0.0
    for name, p in one.items():
        a, b = (
            torch.as_tensor(x, dtype=torch.float64).flatten() for x in (p, other[name])
        )
        if not torch.equal(a.isnan(), b.isnan()):
            return math.inf
        worst = max(worst, float((a - b).detach().nan_to_num().abs().max()))
    return worst


def _from_formula(told: Mapping[str, Any], formula: Mapping[str, Any]) -> float:
    """As ``apart``; where the formula is no number, a part of the parameters has to be none."""
    if not any(bool(torch.as_tensor(p).isnan().all()) for p in formula.values()):
        return apart(told, formula)
    return (
        0.0
        if any(bool(torch.tensor(p).isnan().any()) for p in told.values())
        else math.inf
    )


def cell(
    column: Mapping[str, Any], verdict: Mapping[str, Any], model: Any
) -> dict[str, Any]:
    """One cell: how far the trainer is from its formula and from itself, and the two of the equation from each other."""
    case, seen = json.loads(verdict["case"]), json.loads(verdict["seen"])
    if "generator" in verdict["why"]:
        return _generators(*seen)
    near = 1e-4 if case["dtype"] == "torch.float32" else 1e-9
    start = model if isinstance(model, dict) else dict(model.named_parameters())
    gives = column["gives"]
    rights, formulas, theirs = [], [], []
    for run, each in zip(case["runs"], seen, strict=True):
        if run is None:
            continue
        right, right_loss = after(case, run, model, "equation")
        trainer = column["packages"][0] in ("transformers", "axolotl")
        filtered = trainer and gives.endswith("of means")
        formula, loss = after(case, run, model, gives, filtered=filtered)
        if gives == "row means" and run["setting"] != "microbatch_size=1":
            formula, loss = after(
                case, {**run, "acts": _joined(run["acts"])}, model, "mean of means"
            )
        if gives == "evaluation":
            params = {
                name: torch.tensor(p).double() for name, p in each["params"].items()
            }
            loss = [evaluated(case, run, model, params)]
        rights.append((right, right_loss[0] if right_loss else None))
        formulas.append((formula, loss))
        theirs.append(
            (each["params"], each["evaluation" if gives == "evaluation" else "loss"])
        )
    moved = apart(rights[-1][0], start) or 1.0
    of_formula = max(
        _from_formula(t, f) / moved if gives != "evaluation" else 0.0
        for (t, _), (f, _) in zip(theirs, formulas, strict=True)
    )
    for (_, told), (_, losses) in zip(theirs, formulas, strict=True):
        known = [loss for loss in losses if not math.isnan(loss)]
        if known and told is not None and not math.isnan(told):
            nearest = min(abs(told - loss) / max(1e-3, abs(loss)) for loss in known)
            of_formula = max(of_formula, nearest)
    equal = len(rights) < 2 or apart(rights[0][0], rights[1][0]) / moved < 1e-9
    differ = (
        apart(theirs[0][0], theirs[1][0]) / moved
        if len(theirs) > 1
        else apart(theirs[0][0], rights[0][0]) / moved
    )
    by_loss = _losses_apart(theirs if len(theirs) > 1 else [theirs[0], rights[0]])
    return {
        "of its formula": of_formula,
        "of each other": max(differ, by_loss),
        # Ten times as far as the formula is, or as rounding takes two computations of it.
        "confirmed": equal
        and of_formula <= near
        and max(differ, by_loss) > 10 * max(of_formula, near / 100),
    }


def _joined(acts: Sequence[Any]) -> list[Any]:
    """Each update on one microbatch of all rows."""
    return [
        [[{key: [row for each in share for row in each[key]] for key in share[0]}]]
        if share
        else []
        for (share,) in acts
    ]


def _losses_apart(pairs: Sequence[tuple[Any, float | None]]) -> float:
    (_, one), (_, other) = pairs
    if one is None or other is None:
        return 0.0
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / max(1e-3, abs(other))


def _generators(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Python's global generator is where ``random.seed(42)`` puts it, 42 being the default of TrainingArguments.seed.

    Or it is somewhere else each time, as with Composer, which draws a seed.
    """
    state = random.getstate()
    random.seed(42)
    as_seeded = marked(random.getstate())
    random.setstate(state)
    by_chance = one["generator"] != other["generator"]
    return {"confirmed": other["generator"] == as_seeded or by_chance}


def biases(column: Mapping[str, Any]) -> bool:
    """Whether the table "How far the cut holds" has what the column's formula gives."""
    found = True
    cases = {name: updates for name, (updates, _, _) in CASES.items()}
    for name, updates in {**cases, FIRST: cases["equal"][:1]}.items():
        told = column["biases"].get(name)
        if not isinstance(told, float) or (
            name == "momentum" and column["gives"] == "mlx"
        ):
            continue  # mlx-lm makes a second step there, from another bias.
        bias = moment = 0.0
        for update in updates:
            parts = [_by_hand(rows, column["gives"] == "mlx") for rows in update]
            if name == FIRST:
                parts = [_by_hand([[0]], False)._replace(unshifted=2)]
            total = float(FORMULAS[column["gives"]](parts))
            counted = any(each.counts for each in parts)
            if counted or column["gives"] not in ("equation", "first call"):
                moment = (0.5 if name == "momentum" else 0.0) * moment + total
                bias -= moment
        found &= abs(bias - told) < 1e-6 or (math.isnan(bias) and math.isnan(told))
    return found


def _by_hand(rows: Sequence[Sequence[int]], pad: bool) -> Part:
    """Gradients of the first bias: -½ for label 0, and ½ for label 1; mlx-lm has a 0 behind each row."""
    each = [
        ([-0.5 if label == 0 else 0.5 for label in row if label >= 0] + [-0.5] * pad)
        for row in rows
    ]
    sums = [(sum(row), float(len(row))) for row in each]
    total, count = sum(g for g, _ in sums), sum(n for _, n in sums)
    return Part(
        total, count, len(rows), count + sum(bool(n) for _, n in sums), sums, count
    )


def checked(columns: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """All cells that say wrong, by column and law."""
    makes = {column.name: column.make for column in COLUMNS}
    found: dict[str, dict[str, Any]] = {}
    for column in columns:
        if column["biases"]:
            found[column["name"]] = {"by hand": {"confirmed": biases(column)}}
        for law, verdict in column["verdicts"].items():
            if verdict["finding"] != "wrong":
                continue
            if verdict.get("by_hand"):
                # m = ½ m + 0: half of the step before; and of T1 the table itself.
                half = abs((column["moved_by_momentum"] or 0.0) - 0.5) < 1e-4
                confirmed = half if law == "T7" else biases(column)
                found.setdefault(column["name"], {})[law] = {"confirmed": confirmed}
                continue
            drawn = json.loads(verdict["case"])["params"]
            model: Any = (
                {name: torch.tensor(p).double() for name, p in drawn.items()}
                if drawn
                else makes[column["name"]]().capabilities.task.model
            )
            found.setdefault(column["name"], {})[law] = cell(column, verdict, model)
    return found


def find_folders() -> None:
    """Lets the packages be found that are in folders below ``build``, behind the others."""
    build = Path(__file__).parent.parent.parent / "build"
    folders = dict.fromkeys(column.folder for column in COLUMNS if column.folder)
    sys.path += [str(build / folder) for folder in folders]


def main() -> None:
    """Says of each cell whether it is confirmed."""
    find_folders()
    path = Path(__file__).parent.parent / "results" / "conformance.json"
    found = checked(json.loads(path.read_text())["columns"])
    cells = [
        (name, law, each) for name, laws in found.items() for law, each in laws.items()
    ]
    for name, law, each in cells:
        print(f"{'ok ' if each['confirmed'] else 'NOT'} {name}, {law}: {each}")
    missed = [each for *_, each in cells if not each["confirmed"]]
    print(
        f"{len(cells) - len(missed)} of {len(cells)} cells that say wrong are confirmed"
    )
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
