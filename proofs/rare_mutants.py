"""Mistakes put into the loop by hand that show in few cases alone: the kit has to find them.

``python -m proofs.rare_mutants`` judges each by all laws, with the cases that everybody gets, and prints a table. ``python -m
proofs.rare_mutants right 120`` looks for false alarms in loops that are right, for so many seconds.
"""

import sys
import time

import numpy
import torch

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

LOOPS = [
    ("the fourth of four microbatches counts twice",
        scaled("2 if (len(share), at) == (4, 3) else 1")),
    ("of seven microbatches or more the last is left out",
        scaled("not (len(share) >= 7 and at == len(share) - 1)")),
    ("the gradients of exactly nine microbatches are averaged twice",
        scaled("1 / 9 if len(share) == 9 else 1")),
    ("the fourth update is twice as long",
        before_step("[p.grad.mul_(1 + (self.updates == 3)) for p in self.models[rank].parameters()]")),
    ("the fifth update is left out", guarded("self.updates != 4")),
    ("before the sixth update momentum is lost",
        before_step("self.updates == 5 and optimizer.state.clear()")),
    ("momentum is lost when the number of microbatches changes",
        before_step("len(group[rank]) == getattr(self, 'k', len(group[rank])) or optimizer.state.clear()")
        + after_update("self.k = len(group[-1])")),
    ("no step where the last microbatch is empty",
        guarded("(not group[-1] or self.count(group[-1][-1:]) > 0)")),
    ("an empty microbatch ends the loop",
        [(EACH, EACH + "                if not self.count([batch]):\n                    break\n")]),
    ("rows are cut at eight tokens", of_batch(KEYS % "[:, :8]")),
    ("the first microbatch says how long rows are",
        [(APPEND, APPEND + "            self.long = None\n"),
         *of_batch(KEYS % "[:, :self.long]"),
         (EACH, "            self.long = share[0]['w'].shape[1] if share else None\n" + EACH),
         ("        total = sum(self.count(share) for share in group)\n",
            "        total = sum(self.count(share) for share in group)\n        self.long = None\n")]),
    ("rows of unequal length lose their last column",
        of_batch("batch if batch['w'][:, -1].all() or not batch['w'][:, -1].any() or len(batch['w']) < 2 "
            "else " + KEYS % "[:, :-1]")),
    ("padding on the left is taken to be on the right",
        of_weights("weights if weights[:, 0].any() else weights.roll(-1, 1)")),
    ("ignored rows above the others shift the weights",
        of_weights("weights if weights[0].any() else weights.roll(1, 0)")),
    ("weights above 1 count once", of_weights("weights.clamp(max=1)")),
    ("weights above 2 count twice", of_weights("weights.clamp(max=2)")),
    ("weights below 1 are rounded", of_weights("weights.double().round()")),
    ("a denominator of at least one half", objective("total, 0.5")),
    ("a denominator of at most 64", objective("min(total, 64)")),
    ("the count in bfloat16",
        [(TOTAL, "        total = float(torch.tensor(sum(counts)).bfloat16())\n")]),
    ("the count of the last microbatch stands for all",
        objective("self.count(share[-1:]) * sum(map(len, group))")),
    ("gradients are summed in float32",
        [(REDUCED, "whole = torch.stack(grads).float().sum(0).to(grads[0].dtype)")]),
    ("a rank without microbatches shrinks the others",
        [(REDUCED, "whole = torch.stack(grads).sum(0) * (1 if all(group) else 1 - 1 / len(group))")]),
    ("the third rank counts twice",
        [(REDUCED, "whole = torch.stack(grads).sum(0) + (grads[2] if len(grads) > 2 else 0)")]),
    ("the second rank leaves out the third update", guarded("(rank, self.updates) != (1, 2)")),
    ("ranks with unequally many microbatches are averaged",
        [(REDUCED, "whole = torch.stack(grads).sum(0) / (len({*map(len, group)}) if len(group) > 2 else 1)")]),
    ("weight decay once for each microbatch",
        before_step("[p.grad.add_(p.data, alpha=self.problem.weight_decay * max(0, len(group[0]) - 1)) "
            "for p in self.models[rank].parameters()]")),
    ("the bias does not decay",
        before_step("[p.grad.sub_(self.problem.weight_decay * p.data) "
            "for p in self.models[rank].parameters() if p.ndim == 0]")),
    ("gradients above 8 are clipped",
        before_step("torch.nn.utils.clip_grad_norm_(self.models[rank].parameters(), 8.0)")),
    ("no step where the loss is zero", guarded("sum(sums) != 0")),
    ("momentum is lost on load", [("optimizer.load_state_dict(state)", "pass")]),
    ("momentum stays from the run before",
        [("        self.updates = 0\n", "        self.updates = 0\n"
            "        for kept, now in zip(getattr(self, 'kept', []), self.optimizers):\n"
            "            for one, other in zip(kept.param_groups[0]['params'], now.param_groups[0]['params']):\n"
            "                now.state[other].update(kept.state[one])\n"
            "        self.kept = self.optimizers\n")]),
    ("a step of nothing resets momentum",
        [(TOTAL, TOTAL + "        [total or o.state.clear() for o in self.optimizers]\n")]),
    ("the norm is that of the weights alone",
        [('"grad_norm": norms[rank],', '"grad_norm": float(self.models[rank].weight.grad.norm()),')]),
    ("the norm is reported as at most 4", [('"grad_norm": norms[rank],', '"grad_norm": min(norms[rank], 4),')]),
    ("the loss is reported without the first microbatch",
        [(APPEND, "            sums.append(loss if len(share) < 4 else 0.75 * loss)\n")]),
    ("the count is reported as a whole number", [('"num_tokens": total,', '"num_tokens": int(total),')]),
    ("evaluation drops elements", [(", training=False", "")]),
    ("evaluation forgets momentum",
        [("        return sum(sums) / total",
            "        [o.state.clear() for o in self.optimizers]\n        return sum(sums) / total")]),
    ("torch is seeded at each update", after_update("torch.manual_seed(0)")),
    ("NumPy's generator is used", after_update("__import__('numpy').random.rand()")),
    ("the default dtype is set", after_update("torch.set_default_dtype(torch.float64)")),
    ("the batch is overwritten", [(BACKWARD, BACKWARD + "                batch['w'].zero_()\n")]),
    ("the list of microbatches is used up", [(APPEND, APPEND + "            share.clear()\n")]),
    ("a microbatch like the one before is left out",
        [(EACH, EACH + "                if batch is not share[0] and all(torch.equal(batch[k], self.seen[k]) for k in batch):\n"
            "                    continue\n                self.seen = batch\n")]),
    ("equal rows of a microbatch count once",
        [("        counts = [", "        group = [[once(batch) for batch in share] for share in group]\n        counts = ["),
         ("def norm(", "def once(batch):\n"
            "    kept = [i for i, row in enumerate(zip(*[x.tolist() for x in batch.values()]))\n"
            "            if row not in list(zip(*[x.tolist() for x in batch.values()]))[:i]]\n"
            "    return {key: x[kept] for key, x in batch.items()}\n\n\ndef norm(")]),
    ("counts are kept by shape",
        [(TOTAL, "        shapes = str([[b['w'].shape for b in share] for share in group])\n"
            "        self.cache = getattr(self, 'cache', {}) if self.updates else {}\n"
            "        total = self.cache.setdefault(shapes, sum(counts))\n")]),
    ("noise follows the number of the update and the microbatch's rows",
        [("manual_seed(1000 * key + column)", "manual_seed(1000 * key + column + 77 * (rows > 3))")]),
]  # fmt: skip


def plain(model, optimizer, microbatches, problem):
    """The loop that divides first."""
    optimizer.zero_grad()
    count = sum([problem.weights(batch).sum() for batch in microbatches], torch.zeros(()))
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
    if count > 0:
        optimizer.step()


def divided_last(model, optimizer, microbatches, problem):
    """Gradients of sums, divided once."""
    optimizer.zero_grad()
    for batch in microbatches:
        (problem.losses(model, batch) * problem.weights(batch)).sum().backward()
    if count := float(sum(problem.weights(batch).sum() for batch in microbatches)):
        for p in model.parameters():
            p.grad /= count
        optimizer.step()


def clipped(model, optimizer, microbatches, problem):
    """With gradients of norm 1 at most."""
    optimizer.zero_grad()
    count = sum([problem.weights(batch).sum() for batch in microbatches], torch.zeros(()))
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
    if count > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def adamw(model, problem):
    """AdamW at the problem's rate."""
    return model, torch.optim.AdamW(model.parameters(), problem.learning_rate, weight_decay=0.5)


def on_ranks(model, optimizer, microbatches, problem):
    """The count and the gradients are summed over the processes."""
    optimizer.zero_grad()
    count = sum([problem.weights(b).sum() for b in microbatches], torch.zeros(())).double()
    torch.distributed.all_reduce(count)
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
    if count > 0:
        optimizer.step()


def pure(problem, axis):
    """purestep's own step."""
    params, apply = ps.from_module(problem.module())
    numbers = {"momentum": problem.momentum, "weight_decay": problem.weight_decay}
    optimizer = ps.optim.sgd(problem.learning_rate, **numbers)

    def loss_fn(params, batch):
        return problem.losses(lambda x: apply(params, x), batch)

    step = ps.make_update_step(loss_fn, optimizer, weight_fn=problem.weights, axis=axis)
    return params, optimizer.init(params), step


class ByHand:
    """NumPy."""

    abilities = ps.testing.Abilities()

    def start(self, problem, ranks):
        self.problem, self.p = problem, {k: v.numpy() for k, v in problem.params().items()}
        self.m = {name: 0 * value for name, value in self.p.items()}

    def update(self, group):
        (microbatches,) = group
        count = sum(batch["w"].numpy().sum() for batch in microbatches)
        if count == 0:
            return
        grads = {name: self.problem.weight_decay * value for name, value in self.p.items()}
        for batch in microbatches:
            x, y, w = (batch[key].numpy() for key in ("x", "y", "w"))
            slope = 2 * (x @ self.p["weight"] + self.p["bias"] - y) * w / count
            grads["weight"] = grads["weight"] + numpy.einsum("rc,rcf->f", slope, x)
            grads["bias"] = grads["bias"] + slope.sum()
        for name in self.p:
            self.m[name] = self.problem.momentum * self.m[name] + grads[name]
            self.p[name] = self.p[name] - self.problem.learning_rate * self.m[name]

    def observe(self):
        return [ps.testing.Observation({k: torch.as_tensor(v) for k, v in self.p.items()})]


A = ps.testing.Abilities
RIGHT = {
    "the loop of the proofs": PlainLoop,
    "the loop that divides first": lambda: ps.testing.loop(plain),
    "divided last": lambda: ps.testing.loop(divided_last),
    "float32": lambda: ps.testing.loop(plain, abilities=A(dtype=torch.float32)),
    "AdamW": lambda: ps.testing.loop(plain, adamw, A(sgd=False)),
    "clipped": lambda: ps.testing.loop(clipped, abilities=A(sgd=False)),
    "NumPy": ByHand,
    "a pure step on threads": lambda: ps.testing.PureTrainer(pure, A(ranks=3)),
    "two processes": lambda: ps.testing.loop(on_ranks, abilities=A(ranks=2)),
}


def main() -> None:
    """The table, or the false alarms."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["right"]:
        until = time.monotonic() + float(sys.argv[2])
        seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
        total = {}
        trainers = {
            name: make() for name, make in RIGHT.items() if not sys.argv[4:] or name in sys.argv[4:]
        }
        while time.monotonic() < until:
            seed += 1
            for name, trainer in trainers.items():
                for v in ps.testing.judge(trainer, cases=30, seed=seed):
                    total[name] = total.get(name, 0) + v.cases
                    if v.finding in ("wrong", "refuses"):
                        print("FALSE ALARM", name, seed, v, v.case.words(), flush=True)
        print(seed, sum(total.values()), total)
        return
    found = 0
    for number, (name, patches) in enumerate(LOOPS):
        if sys.argv[1:] and str(number) not in sys.argv[1:]:
            continue
        start, by = time.process_time(), []
        trainer = build(Bug(str(number), "", name, patches))
        cases = 0
        for law in ps.testing.LAWS:
            (v,) = ps.testing.judge(trainer, [law], shrink=0)
            cases += v.cases
            if v.finding in ("wrong", "refuses"):
                by.append(law if v.finding == "wrong" else f"({law} refuses: {v.why})")
        found += bool(by)
        print(
            f"{number:2} {name:70} {' '.join(by) or 'NOT FOUND'}  {time.process_time() - start:.0f} s",
            flush=True,
        )
    print(found, len(LOOPS))


if __name__ == "__main__":
    main()
