"""Puts bugs that happened into the loop by hand, one at a time: each must break a law of the kit.

The kit sees a black box. ``UNSEEN`` in mutants.py explains why it does not show the other bugs.
"""

import inspect
from types import ModuleType
from typing import NamedTuple

from purestep.testing import Trainer
from support import plain_loop

Patches = list[tuple[str, str]]
"""Words of the loop, and their replacements."""


class Bug(NamedTuple):
    """A bug by its number, a law that it breaks, and replacements for words of the loop.

    A letter behind the number tells several variants of a bug apart.
    """

    number: str
    law: str
    description: str
    patches: Patches


def build(bug: Bug) -> Trainer:
    """Builds the loop with the bug in it."""
    source = inspect.getsource(plain_loop)
    for old, new in bug.patches:
        count = source.count(old)
        assert count == 1, f"{bug.number}: {old!r} occurs {count} times"
        source = source.replace(old, new)
    module = ModuleType(f"plain_loop_{bug.number}")
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    trainer: Trainer = module.PlainLoop()
    return trainer


OBJECTIVE = "objective = self.weighted_sum(model, batch) / max(total, 1e-300)"
WEIGHTS = "weights = self.problem.weights(batch).to(torch.float64)"
COUNT = "return float(sum(self.problem.weights(batch).sum() for batch in share))"
TOTAL = "        total = sum(counts)\n"
REDUCED = "whole = torch.stack(grads).sum(0)"
GUARD = "if total > 0 and finite[rank]:"
EACH = "            for batch in share:\n"
ZERO = "            model.zero_grad()\n            loss = 0.0\n"
BACKWARD = "                objective.backward()\n"


def replace(old: str, new: str) -> Patches:
    """Replaces words of the loop."""
    return [(old, new)]


def objective(divisor: str) -> Patches:
    """Divides the weighted sum by something else."""
    new = f"objective = self.weighted_sum(model, batch) / max({divisor}, 1e-300)"
    return replace(OBJECTIVE, new)


def insert_before(words: str, lines: str) -> Patches:
    """Inserts lines before these words."""
    return replace(words, lines + words)


def insert_after(words: str, lines: str) -> Patches:
    """Inserts lines after these words."""
    return replace(words, words + lines)


BUGS = [
    Bug(
        "1",
        "T1",
        "mean of microbatch means",
        objective("self.count([batch]) * sum(map(len, group))"),
    ),
    Bug(
        "2",
        "T2",
        "count summed over microbatches, not over ranks",
        objective("self.count(share) * len(group)"),
    ),
    Bug(
        "3",
        "T4",
        "unshifted labels counted: one too many per row",
        insert_after(
            TOTAL,
            "        total += sum(len(b['w']) for share in group for b in share)\n",
        ),
    ),
    Bug(
        "4",
        "T0",
        "shifted labels counted for a model that does not shift",
        replace(
            COUNT,
            "return float(sum(self.problem.weights(batch)[:, 1:].sum() for batch in share))",
        ),
    ),
    Bug(
        "5",
        "T4",
        "mask applied to the numerator only",
        replace(
            COUNT,
            "return float(sum(self.problem.weights(batch).numel() for batch in share))",
        ),
    ),
    Bug(
        "6",
        "T0",
        "counted on other labels than the loss uses",
        replace(COUNT, "return float(sum((batch['y'] != 0).sum() for batch in share))"),
    ),
    Bug(
        "7",
        "T2",
        "some ranks left out of the count",
        replace(TOTAL, "        total = sum(counts[::2])\n"),
    ),
    Bug(
        "8",
        "T0",
        "replicas counted again",
        replace(TOTAL, "        total = 2 * sum(counts)\n"),
    ),
    Bug(
        "9",
        "T7",
        "count carried over from the last step",
        replace(
            TOTAL,
            "        total = self.updates and self.last or sum(counts)\n"
            "        self.last = sum(counts)\n",
        ),
    ),
    Bug("10", "T5", "denominator clamped to at least 1", objective("total, 1")),
    Bug(
        "11",
        "T2",
        "the world's averaging not undone: gradient over world size",
        replace(REDUCED, "whole = torch.stack(grads).mean(0)"),
    ),
    Bug(
        "12",
        "T2",
        "world size used where data-parallel size is meant",
        replace(
            REDUCED,
            "whole = torch.stack(grads).mean(0) * (len(grads) + (len(grads) > 1))",
        ),
    ),
    Bug(
        "13",
        "T2",
        "an already global loss averaged over ranks again",
        replace('"loss": sum(sums),', '"loss": sum(sums) / len(sums),')
        + replace(REDUCED, "whole = torch.stack(grads).mean(0)"),
    ),
    Bug(
        "14a",
        "T1",
        "divided by the number of microbatches as well",
        objective("total * len(share)"),
    ),
    Bug(
        "14b",
        "T1",
        "multiplied by the number of microbatches",
        objective("total / len(share)"),
    ),
    Bug(
        "15",
        "T1",
        "a training-only factor leaks into evaluation",
        replace(
            "        return sum(sums) / total",
            "        return sum(sums) / total / sum(map(len, group))",
        ),
    ),
    Bug(
        "16",
        "T5",
        "loss normalised after the backward: metric right, gradient N times too large",
        replace(BACKWARD, "                (objective * total).backward()\n"),
    ),
    Bug(
        "17",
        "T1",
        "gradients rescaled at every microbatch: a decaying average",
        insert_after(
            BACKWARD,
            "                for p in model.parameters():\n"
            "                    p.grad /= 1 + (batch is not share[0])\n",
        ),
    ),
    Bug(
        "18",
        "T5",
        "the normaliser is accepted and ignored",
        objective("self.problem.weights(batch).numel()"),
    ),
    Bug(
        "19",
        "T5",
        "normaliser dropped: the learning rate follows the token count",
        objective("1"),
    ),
    Bug(
        "20",
        "T2",
        "skip scaling when K = 1, with the local count",
        objective("self.count(share) * len(group) if len(share) == 1 else total"),
    ),
    Bug(
        "25a",
        "T15",
        "the same random key for two microbatches",
        replace('key = int(batch["key"][row])', "key = row"),
    ),
    Bug(
        "25b",
        "T15",
        "keys by position in the padded microbatch",
        replace(
            "manual_seed(1000 * key + column)", "manual_seed(key * length + column)"
        ),
    ),
    Bug(
        "26",
        "T3",
        "the last microbatch's state overwrites the earlier ones",
        replace(
            BACKWARD,
            "                grads = torch.autograd.grad(objective, [*model.parameters()])\n"
            "                for p, grad in zip(model.parameters(), grads):\n"
            "                    p.grad = grad\n",
        ),
    ),
    Bug(
        "27",
        "T7",
        "skip by multiplication: one NaN poisons everything after",
        replace(
            GUARD,
            "for p in self.models[rank].parameters():\n"
            "                p.grad = p.grad * finite[rank]\n"
            "            if total > 0:",
        ),
    ),
    Bug(
        "28a",
        "T7",
        "skip that still decays weights and moves moments",
        replace(
            GUARD,
            "if not finite[rank]:\n"
            "                for p in self.models[rank].parameters():\n"
            "                    p.grad.zero_()\n"
            "            if total > 0:",
        ),
    ),
    Bug(
        "28b",
        "T7",
        "an update without tokens still decays weights and moves moments",
        replace(GUARD, "if finite[rank]:"),
    ),
    Bug(
        "29",
        "T1",
        "accumulation in bfloat16",
        insert_after(
            BACKWARD,
            "                for p in model.parameters():\n"
            "                    p.grad = p.grad.bfloat16().to(p.dtype)\n",
        ),
    ),
    Bug(
        "30",
        "T3",
        "zeroing inside the loop: only the last microbatch survives",
        insert_before(BACKWARD, "                model.zero_grad()\n"),
    ),
    Bug(
        "31",
        "T1",
        "copying instead of adding: only the first survives",
        insert_before(
            BACKWARD,
            "                if batch is not share[0]:\n                    continue\n",
        ),
    ),
    Bug(
        "32",
        "T2",
        "the last microbatch added after the reduction",
        insert_before(
            BACKWARD,
            "                if len(group) > 1 and len(share) > 1 and batch is share[-1]:\n"
            "                    continue\n",
        ),
    ),
    Bug(
        "33",
        "T1",
        "the first step taken after a single microbatch",
        replace(
            EACH, EACH.replace("share:", "share[:1] if self.updates == 0 else share:")
        ),
    ),
    Bug(
        "34",
        "T1",
        "a short tail divided by the full K",
        objective(
            "total * max(getattr(self, 'full', len(share)), len(share)) / len(share)"
        )
        + replace(
            "        self.updates += 1\n",
            "        self.updates += 1\n        self.full = len(group[0])\n",
        ),
    ),
    Bug(
        "35",
        "T16",
        "a tail that leaks into the next group",
        replace(
            ZERO,
            "            if not self.updates:\n"
            "                model.zero_grad()\n"
            "            loss = 0.0\n",
        ),
    ),
    Bug(
        "36a",
        "T7",
        "non-finite check after the optimizer has moved",
        replace(GUARD, "if total > 0:"),
    ),
    Bug(
        "36b",
        "T7",
        "non-finite check on rank 0's own gradient alone",
        replace(
            "        for params in zip(",
            "        mine = norm(self.models[0]) if group[0] else 0.0\n"
            "        for params in zip(",
        )
        + replace(GUARD, "if total > 0 and mine < float('inf'):"),
    ),
    Bug(
        "38",
        "T2",
        "different numbers of microbatches per rank: a hang",
        insert_after(
            TOTAL,
            "        if len({len(share) for share in group}) > 1:\n"
            "            raise TimeoutError('the ranks wait for each other')\n",
        ),
    ),
    Bug(
        "39a",
        "T1",
        "tokens off by K",
        replace('"num_tokens": total', '"num_tokens": total / max(1, len(group[0]))'),
    ),
    Bug(
        "39b",
        "T4",
        "tokens counting padding",
        replace(
            '"num_tokens": total',
            '"num_tokens": sum(self.problem.weights(b).numel() for s in group for b in s),',
        ),
    ),
    Bug(
        "40a",
        "T2",
        "norm of one rank",
        replace(
            "        for params in zip(",
            "        held = [p.grad is not None for p in model.parameters()]\n"
            "        own = [norm(model) if any(held) else 0.0 for model in self.models]\n"
            "        for params in zip(",
        )
        + replace('"grad_norm": norms[rank],', '"grad_norm": own[rank],'),
    ),
    Bug(
        "40b",
        "T1",
        "norm summed over microbatches",
        insert_after(ZERO, "            added = 0.0\n")
        + insert_after(BACKWARD, "                added += norm(model)\n")
        + replace('"grad_norm": norms[rank],', '"grad_norm": added,'),
    ),
    Bug(
        "41",
        "T2",
        "loss averaged over ranks instead of tokens",
        replace(
            '"loss": sum(sums),',
            '"loss": sum(s * total / max(c, 1e-300) for s, c in zip(sums, counts)) / len(sums),',
        ),
    ),
    Bug(
        "42",
        "T2",
        "NaN logged by a rank without valid tokens",
        replace(
            '"loss": sum(sums),', '"loss": sum(sums) if counts[rank] else float("nan"),'
        ),
    ),
    Bug(
        "45",
        "T0",
        "lr / N in the default dtype, hidden by N being a power of two",
        objective("1 / float(torch.tensor(1 / max(total, 1e-300)))"),
    ),
]
"""The bugs, in order of their numbers."""
