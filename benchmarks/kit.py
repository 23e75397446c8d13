"""How many wrong loops does the kit find, and does it accept right ones?

The mistakes stand in the loop by hand, and show in few cases alone.

    python -m benchmarks.kit                   which laws find each, with the cases of default
    python -m benchmarks.kit right 120 [SEED]  false alarms about right loops, in so many seconds
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import purestep as ps
from proofs.plain_loop import PlainLoop
from proofs.plain_mutants import (
    BACKWARD,
    EACH,
    GUARD,
    REDUCED,
    TOTAL,
    WEIGHTS,
    Bug,
    build,
    objective,
)
from purestep.testing import Abilities, Observation, Problem

Batch = dict[str, Tensor]

COUNTED = "self.problem.weights(batch).sum()"
STEP = "                optimizer.step()\n"
DONE = "        self.updates += 1\n"
APPEND = "            sums.append(loss)\n"
LOSSES = "losses = self.problem.losses(model, "


def scaled(factor: str) -> list[tuple[str, str]]:
    """The gradient of a microbatch, the one at ``at``, is enlarged."""
    return [
        (EACH, "            for at, batch in enumerate(share):\n"),
        (BACKWARD, f"                (objective * ({factor})).backward()\n"),
    ]


def guarded(condition: str) -> list[tuple[str, str]]:
    """A step on this condition alone."""
    return [(GUARD, f"if total > 0 and finite[rank] and {condition}:")]


def before_step(line: str) -> list[tuple[str, str]]:
    """A line before the optimizer moves."""
    return [(STEP, f"                {line}\n{STEP}")]


def after_update(*lines: str) -> list[tuple[str, str]]:
    """Lines at the end of an update."""
    return [(DONE, DONE + "".join(f"        {line}\n" for line in lines))]


def of_weights(expression: str) -> list[tuple[str, str]]:
    """The weights that multiply and those that are counted, changed alike."""
    return [
        (WEIGHTS, f"{WEIGHTS}\n        weights = {expression}"),
        (COUNTED, f"(lambda weights: ({expression}).sum())({COUNTED[:-6]})"),
    ]


def of_batch(expression: str) -> list[tuple[str, str]]:
    """Another batch for the loss and its weights."""
    return [(WEIGHTS, f"batch = {expression}\n        {WEIGHTS}")]


KEYS = "{key: x%s if x.ndim > 1 else x for key, x in batch.items()}"

LOOPS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("T1", "the fourth of four microbatches counts twice",
        scaled("2 if (len(share), at) == (4, 3) else 1")),
    ("T1", "of seven microbatches or more the last is left out",
        scaled("not (len(share) >= 7 and at == len(share) - 1)")),
    ("T1", "the gradients of exactly nine microbatches are averaged twice",
        scaled("1 / 9 if len(share) == 9 else 1")),
    ("T0", "the fourth update is twice as long",
        before_step("[p.grad.mul_(1 + (self.updates == 3)) for p in self.models[rank].parameters()]")),
    ("T0", "the fifth update is left out", guarded("self.updates != 4")),
    ("T0", "before the sixth update momentum is lost",
        before_step("self.updates == 5 and optimizer.state.clear()")),
    ("T1", "momentum is lost when the number of microbatches changes",
        before_step("len(group[rank]) == getattr(self, 'k', len(group[rank])) or optimizer.state.clear()")
        + after_update("self.k = len(group[-1])")),
    ("T1", "no step where the last microbatch is empty",
        guarded("(not group[-1] or self.count(group[-1][-1:]) > 0)")),
    ("T1", "an empty microbatch ends the loop",
        [(EACH, EACH + "                if not self.count([batch]):\n                    break\n")]),
    ("T0", "rows are cut at eight tokens", of_batch(KEYS % "[:, :8]")),
    ("T4", "the first microbatch says how long rows are",
        [(APPEND, APPEND + "            self.long = None\n"),
         *of_batch(KEYS % "[:, :self.long]"),
         (EACH, "            self.long = share[0]['w'].shape[1] if share else None\n" + EACH),
         ("        total = sum(self.count(share) for share in group)\n",
            "        total = sum(self.count(share) for share in group)\n        self.long = None\n")]),
    ("T0", "rows of unequal length lose their last column",
        of_batch("batch if batch['w'][:, -1].all() or not batch['w'][:, -1].any() or len(batch['w']) < 2 "
            "else " + KEYS % "[:, :-1]")),
    ("T4", "padding on the left is taken to be on the right",
        of_weights("weights if weights[:, 0].any() else weights.roll(-1, 1)")),
    ("T4", "ignored rows above the others shift the weights",
        of_weights("weights if weights[0].any() else weights.roll(1, 0)")),
    ("T0", "weights above 1 count once", of_weights("weights.clamp(max=1)")),
    ("T0", "weights above 2 count twice", of_weights("weights.clamp(max=2)")),
    ("T0", "weights below 1 are rounded", of_weights("weights.double().round()")),
    ("T5", "a denominator of at least one half", objective("total, 0.5")),
    ("T0", "a denominator of at most 64", objective("min(total, 64)")),
    ("T0", "the count in bfloat16",
        [(TOTAL, "        total = float(torch.tensor(sum(counts)).bfloat16())\n")]),
    ("T1", "the count of the last microbatch stands for all",
        objective("self.count(share[-1:]) * sum(map(len, group))")),
    ("T0", "gradients are summed in float32",
        [(REDUCED, "whole = torch.stack(grads).float().sum(0).to(grads[0].dtype)")]),
    ("T2", "a rank without microbatches shrinks the others",
        [(REDUCED, "whole = torch.stack(grads).sum(0) * (1 if all(group) else 1 - 1 / len(group))")]),
    ("T2", "the third rank counts twice",
        [(REDUCED, "whole = torch.stack(grads).sum(0) + (grads[2] if len(grads) > 2 else 0)")]),
    ("T2", "the second rank leaves out the third update", guarded("(rank, self.updates) != (1, 2)")),
    ("T2", "ranks with unequally many microbatches are averaged",
        [(REDUCED, "whole = torch.stack(grads).sum(0) / (len({*map(len, group)}) if len(group) > 2 else 1)")]),
    ("T1", "weight decay once for each microbatch",
        before_step("[p.grad.add_(p.data, alpha=self.problem.weight_decay * max(0, len(group[0]) - 1)) "
            "for p in self.models[rank].parameters()]")),
    ("T0", "the bias does not decay",
        before_step("[p.grad.sub_(self.problem.weight_decay * p.data) "
            "for p in self.models[rank].parameters() if p.ndim == 0]")),
    ("T0", "gradients above 8 are clipped",
        before_step("torch.nn.utils.clip_grad_norm_(self.models[rank].parameters(), 8.0)")),
    ("T0", "no step where the loss is zero", guarded("sum(sums) != 0")),
    ("T16", "momentum is lost on load", [("optimizer.load_state_dict(state)", "pass")]),
    ("T6", "momentum stays from the run before",
        [("        self.updates = 0\n", "        self.updates = 0\n"
            "        for kept, now in zip(getattr(self, 'kept', []), self.optimizers):\n"
            "            for one, other in zip(kept.param_groups[0]['params'], now.param_groups[0]['params']):\n"
            "                now.state[other].update(kept.state[one])\n"
            "        self.kept = self.optimizers\n")]),
    ("T7", "a step of nothing resets momentum",
        [(TOTAL, TOTAL + "        [total or o.state.clear() for o in self.optimizers]\n")]),
    ("T0", "the norm is that of the weights alone",
        [('"grad_norm": norms[rank],', '"grad_norm": float(self.models[rank].weight.grad.norm()),')]),
    ("T0", "the norm is reported as at most 4", [('"grad_norm": norms[rank],', '"grad_norm": min(norms[rank], 4),')]),
    ("T1", "the loss is reported without the first microbatch",
        [(APPEND, "            sums.append(loss if len(share) < 4 else 0.75 * loss)\n")]),
    ("T0", "the count is reported as a whole number", [('"num_tokens": total', '"num_tokens": int(total)')]),
    ("T15", "evaluation drops elements", [(", training=False", "")]),
    ("T6", "evaluation forgets momentum",
        [("        return sum(sums) / total",
            "        [o.state.clear() for o in self.optimizers]\n        return sum(sums) / total")]),
    ("T6", "torch is seeded at each update", after_update("torch.manual_seed(0)")),
    ("T6", "NumPy's generator is used", after_update("__import__('numpy').random.rand()")),
    ("T6", "the default dtype is set", after_update("torch.set_default_dtype(torch.float64)")),
    ("T6", "the batch is overwritten", [(BACKWARD, BACKWARD + "                batch['w'].zero_()\n")]),
    ("T6", "the list of microbatches is used up", [(APPEND, APPEND + "            share.clear()\n")]),
    ("T1", "a microbatch like the one before is left out",
        [(EACH, EACH + "                if batch is not share[0] and all(torch.equal(batch[k], self.seen[k]) for k in batch):\n"
            "                    continue\n                self.seen = batch\n")]),
    ("T5", "equal rows of a microbatch count once",
        [("        counts = [", "        group = [[once(batch) for batch in share] for share in group]\n        counts = ["),
         ("def norm(", "def once(batch):\n"
            "    kept = [i for i, row in enumerate(zip(*[x.tolist() for x in batch.values()]))\n"
            "            if row not in list(zip(*[x.tolist() for x in batch.values()]))[:i]]\n"
            "    return {key: x[kept] for key, x in batch.items()}\n\n\ndef norm(")]),
    ("T0", "counts are kept by shape",
        [(TOTAL, "        shapes = str([[b['w'].shape for b in share] for share in group])\n"
            "        self.cache = getattr(self, 'cache', {}) if self.updates else {}\n"
            "        total = self.cache.setdefault(shapes, sum(counts))\n")]),
    ("T15", "noise follows the number of the update and the microbatch's rows",
        [("manual_seed(1000 * key + column)", "manual_seed(1000 * key + column + 77 * (rows > 3))")]),
]  # fmt: skip
"""A law that finds each, what it does, and its words for those of the loop."""


MORE: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("T1", "six microbatches are averaged",
        scaled("0.5 if len(share) == 6 else 1")),
    ("T1", "no step with eight microbatches",
        guarded("len(group[rank]) != 8")),
    ("T0", "the sixth update is turned round",
        before_step("[p.grad.mul_(1 - 2 * (self.updates == 5)) for p in self.models[rank].parameters()]")),
    ("T0", "rows whose last token is ignored are left out",
        of_weights("weights * (weights[:, -1:] > 0)")),
    ("T0", "rows with one counted token are left out",
        of_weights("weights * ((weights > 0).sum(1, keepdim=True) > 1)")),
    ("T0", "microbatches of one row are left out",
        scaled("len(batch['w']) != 1")),
    ("T0", "microbatches of five rows or more count twice",
        scaled("2 if len(batch['w']) > 4 else 1")),
    ("T0", "denominator leaves out microbatches of weight below 1",
        objective("sum(c for c in (self.count([b]) for s in group for b in s) if c >= 1)")),
    ("T0", "weights below a half are a half",
        of_weights("torch.where(weights > 0, weights.clamp(min=0.5), 0)")),
    ("T0", "total truncated",
        [(TOTAL, "        total = sum(counts)\n        total = float(int(total)) if total >= 1 else total\n")]),
    ("T2", "rank 1 divides by its own count where it is the larger",
        objective("self.count(share) if share is group[1 % len(group)] and self.count(share) > total - self.count(share) > 0 else total")),
    ("T2", "rank 2 with one microbatch is left out",
        [(REDUCED, "whole = torch.stack(grads[:2] if len(grads) > 2 and len(group[2]) == 1 else grads).sum(0)")]),
    ("T2", "rank 1 drifts at the second update",
        before_step("[p.grad.mul_(1.0001) for p in self.models[rank].parameters() if (rank, self.updates) == (1, 1)]")),
    ("T2", "norm is of the first rank's own microbatches on three ranks",
        [('"grad_norm": norms[rank],', '"grad_norm": norms[rank] * (2 if len(group) == 3 else 1),')]),
    ("T7", "a skipped update resets momentum",
        [(GUARD, "if total > 0 and not finite[rank]:\n                optimizer.state.clear()\n            "+GUARD)]),
    ("T16", "only rank 0's state is put back",
        [("            optimizer.load_state_dict(state)", "            optimizer is self.optimizers[0] and optimizer.load_state_dict(state)")]),
    ("", "saved state is the live one",
        [("return copy.deepcopy((self.models, [o.state_dict() for o in self.optimizers], self.updates))","return (self.models, [o.state_dict() for o in self.optimizers], self.updates)"),("= copy.deepcopy(saved)","= saved")]),
    ("T15", "noise by the first row's key",
        [("key = int(batch[\"key\"][row])","key = int(batch[\"key\"][0])")]),
    ("T15", "noise by length",
        [("manual_seed(1000 * key + column)", "manual_seed(1000 * key + column + 7 * length)")]),
    ("T15", "noise by row position",
        [("manual_seed(1000 * key + column)", "manual_seed(1000 * key + column + 131 * (row > 1))")]),
    ("T2", "gradients stay from the update before when it had one microbatch",
        [("            model.zero_grad()\n","            getattr(self, 'one', 0) and self.updates or model.zero_grad()\n            self.one = len(share) == 3\n")]),
    ("T2", "the bias is averaged over ranks",
        [(REDUCED, "whole = torch.stack(grads).sum(0) / (len(grads) if grads[0].ndim == 0 else 1)")]),
    ("T1", "microbatches by count",
        [(EACH, "            for batch in {self.count([b]): b for b in share}.values():\n")]),
    ("T1", "microbatches by shape",
        [(EACH, "            for batch in {str(b['w'].shape): b for b in share}.values():\n")]),
    ("T0", "tokens counted instead of weights",
        [("return float(sum(self.problem.weights(batch).sum() for batch in share))","return float(sum((self.problem.weights(batch) > 0).sum() for batch in share))")]),
    ("T0", "clipped at 100",
        before_step("torch.nn.utils.clip_grad_norm_(self.models[rank].parameters(), 100.0)")),
    ("T0", "clipped by value at 3",
        before_step("torch.nn.utils.clip_grad_value_(self.models[rank].parameters(), 3.0)")),
    ("T0", "targets above 3",
        of_batch("{**batch, 'y': batch['y'].clamp(max=3)}")),
    ("T0", "targets below -3",
        of_batch("{**batch, 'y': batch['y'].clamp(min=-3)}")),
    ("T0", "x above 2",
        of_batch("{**batch, 'x': batch['x'].clamp(max=2)}")),
    ("T2", "only the first rank steps where it has all tokens",
        guarded("not (rank and counts[0] == total)")),
    ("T0", "the first token of rows above five",
        of_weights("torch.cat([0 * weights[:, :1], weights[:, 1:]], 1) if weights.shape[1] > 5 else weights")),
    ("T1", "rows of the second microbatch above six tokens are cut",
        [(EACH, "            for at, batch in enumerate(share):\n                batch = {k: x[:, :6] if x.ndim > 1 and at == 1 else x for k, x in batch.items()}\n")]),
    ("T1", "evaluation averages means",
        [("return sum(sums) / total","return sum(s / max(self.count([b]), 1e-300) for s, b in zip(sums, batches)) / len(batches)")]),
    ("T6", "evaluation steps",
        [("        return sum(sums) / total","        [p.data.mul_(1.001) for m in self.models for p in m.parameters()]\n        return sum(sums) / total")]),
    ("T6", "Python's random",
        after_update("__import__('random').random()")),
    ("T6", "gradients are off",
        [*after_update("torch.set_grad_enabled(False)"), ("        sums = []\n        for model, share", "        torch.set_grad_enabled(True)\n        sums = []\n        for model, share")]),
    ("T6", "threads",
        after_update("torch.set_num_threads(2)")),
    ("", "environment",
        after_update("__import__('os').environ.update(SEEN='1')")),
    ("T2", "weight decay on gradients twice on two ranks",
        before_step("[p.grad.add_(p.data, alpha=self.problem.weight_decay) for p in self.models[rank].parameters() if len(group) == 2]")),
    ("T0", "momentum is averaged with zero at the second update",
        before_step("[s['momentum_buffer'].mul_(0.5) for s in optimizer.state.values() if self.updates == 2 and s.get('momentum_buffer') is not None]")),
    ("T0", "the last column alone where all others are ignored",
        of_weights("weights if weights[:, :-1].any() else 0 * weights")),
    ("T1", "a group all of whose microbatches have one token is averaged",
        scaled("1 / len(share) if all(int((self.problem.weights(b) > 0).sum()) == 1 for b in share) and len(share) > 1 else 1")),
    ("T7", "equal microbatches in different ranks count once",
        [(APPEND, APPEND + "            for other in group[:len(sums) - 1]:\n                if share and len(other) == len(share) and all(torch.equal(a['w'], b['w']) and torch.equal(a['x'], b['x']) for a, b in zip(share, other)):\n                    model.zero_grad()\n")]),
    ("T0", "denominator is a running mean",
        objective("(total if not self.updates else 0.5 * (total + self.last))") + after_update("self.last = total")),
    ("T0", "the learning rate falls with updates",
        before_step("[g.update(lr=self.problem.learning_rate * (0.9 if self.updates >= 4 else 1)) for g in optimizer.param_groups]")),
    ("T0", "first and last row swapped weights",
        of_weights("weights[[len(weights) - 1, *range(1, len(weights) - 1), 0]] if len(weights) > 2 else weights")),
]  # fmt: skip
"""The same, written without a look at what the kit draws; a law is named where one finds it."""


def divided_first(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Σ wᵢ ℓᵢ / N of each microbatch; on several processes N and the gradients are summed."""
    optimizer.zero_grad()
    counts = [problem.weights(batch).sum().double() for batch in microbatches]
    count = torch.stack([torch.zeros((), dtype=torch.float64), *counts]).sum()
    parallel = torch.distributed.is_initialized()
    if parallel:
        torch.distributed.all_reduce(count)
    for batch in microbatches:
        (
            (problem.losses(model, batch) * problem.weights(batch)).sum() / count
        ).backward()
    for p in model.parameters() if parallel else []:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
    if count > 0:
        optimizer.step()


def divided_last(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Gradients of sums, divided once."""
    optimizer.zero_grad()
    for batch in microbatches:
        (problem.losses(model, batch) * problem.weights(batch)).sum().backward()
    if count := float(sum(problem.weights(batch).sum() for batch in microbatches)):
        for p in model.parameters():
            p.grad /= count
        optimizer.step()


class Clipped(torch.optim.SGD):
    """SGD of gradients whose norm is 1 at most."""

    def step(self, closure: Any = None) -> Any:
        """Clips first."""
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def clipped(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """With the problem's rate and momentum."""
    return module, Clipped(module.parameters(), problem.learning_rate, problem.momentum)


def adamw(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """At the problem's rate."""
    params, rate = module.parameters(), problem.learning_rate
    return module, torch.optim.AdamW(params, rate, weight_decay=0.5)


def pure(problem: Problem, axis: ps.Axis) -> tuple[Any, Any, Any]:
    """purestep's own step."""
    params, apply = ps.from_module(problem.module())
    optimizer = ps.optim.sgd(
        problem.learning_rate,
        momentum=problem.momentum,
        weight_decay=problem.weight_decay,
    )

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return problem.losses(lambda x: apply(params, x), batch)

    step = ps.make_update_step(loss_fn, optimizer, weight_fn=problem.weights, axis=axis)
    return params, optimizer.init(params), step


class ByHand:
    """In NumPy."""

    abilities = Abilities()

    def start(self, problem: Problem, ranks: int) -> None:
        """Arrays."""
        self.problem = problem
        self.p: dict[str, Any] = {k: v.numpy() for k, v in problem.params().items()}
        self.m = {name: 0 * value for name, value in self.p.items()}

    def update(self, group: Sequence[Sequence[Batch]]) -> None:
        """The derivative is written out."""
        (microbatches,) = group
        count = sum(batch["w"].numpy().sum() for batch in microbatches)
        if count == 0:
            return
        grads = {
            name: self.problem.weight_decay * value for name, value in self.p.items()
        }
        for batch in microbatches:
            x, y, w = (batch[key].numpy() for key in ("x", "y", "w"))
            slope = 2 * (x @ self.p["weight"] + self.p["bias"] - y) * w / count
            grads["weight"] = grads["weight"] + numpy.einsum("rc,rcf->f", slope, x)
            grads["bias"] = grads["bias"] + slope.sum()
        for name in self.p:
            self.m[name] = self.problem.momentum * self.m[name] + grads[name]
            self.p[name] = self.p[name] - self.problem.learning_rate * self.m[name]

    def observe(self) -> list[Observation]:
        """Tensors."""
        return [Observation({name: torch.as_tensor(p) for name, p in self.p.items()})]


RIGHT: dict[str, Callable[[], Any]] = {
    "the loop of the proofs": PlainLoop,
    "divided first": lambda: ps.testing.loop(divided_first),
    "divided last": lambda: ps.testing.loop(divided_last),
    "float32": lambda: ps.testing.loop(
        divided_first, None, Abilities(dtype=torch.float32)
    ),
    "AdamW": lambda: ps.testing.loop(divided_first, adamw, Abilities(sgd=False)),
    "clipped": lambda: ps.testing.loop(divided_last, clipped, Abilities(sgd=False)),
    "NumPy": ByHand,
    "a pure step on threads": lambda: ps.testing.PureTrainer(pure, Abilities(ranks=3)),
    "two processes": lambda: ps.testing.loop(divided_first, None, Abilities(ranks=2)),
}
"""Loops that are right."""


Loops = list[tuple[str, str, list[tuple[str, str]]]]


def of(number: int, loops: Loops = LOOPS) -> Any:
    """The loop with the mistake of this number."""
    law, name, patches = loops[number]
    return build(Bug(f"rare {number}", law, name, patches))


def findings(loops: Loops) -> None:
    """Prints which laws find each mistake, after how many seconds the first does."""
    for number, (_, name, _) in enumerate(loops):
        start, found, seconds = time.process_time(), [], 0.0
        for law in ps.testing.LAWS:
            (verdict,) = ps.testing.judge(of(number, loops), [law])
            if verdict.finding in ("wrong", "refuses"):
                found.append(law if verdict.finding == "wrong" else f"({law})")
                seconds = seconds or time.process_time() - start
        print(
            f"{number:2} {name:68} {seconds:4.1f} s  {' '.join(found) or 'NOT FOUND'}",
            flush=True,
        )


def alarms(seconds: float, seed: int) -> Counter[str]:
    """False alarms about right loops are printed; returns the cases asked of each."""
    cases: Counter[str] = Counter()
    trainers = {name: make() for name, make in RIGHT.items()}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name = [*trainers][seed % len(trainers)]
        for verdict in ps.testing.judge(trainers[name], seed=seed):
            cases[name] += verdict.cases
            if verdict.case is not None:
                print(
                    f"{name}, seed {seed}: {verdict}; {verdict.case.words()}",
                    flush=True,
                )
        seed += 1
    print(f"{cases.total()} cases, the next seed is {seed}: {dict(cases)}")
    return cases


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["right"]:
        alarms(float(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]))
    else:
        findings([*LOOPS, *MORE])
