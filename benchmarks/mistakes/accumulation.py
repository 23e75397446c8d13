"""Lists mistakes in adding up the gradients of microbatches: zeroing, buffers and passes (laws T1 and T3)."""

from benchmarks.mistakes.edits import (
    ADD_LOSS,
    APPEND_LOSS,
    BACKWARD,
    FOR_BATCH,
    STEP,
    ZERO_GRAD,
    after_backward,
    after_norms,
    after_update,
    at_start,
    define_function,
    replace,
    scale_gradient,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "the fourth of four microbatches counts twice",
        scale_gradient("2 if (len(share), at) == (4, 3) else 1"),
        law="T1",
        required=True,
    ),
    Mistake(
        "the gradients of exactly nine microbatches are averaged twice",
        scale_gradient("1 / 9 if len(share) == 9 else 1"),
        law="T1",
        required=True,
    ),
    Mistake(
        "a microbatch like the one before is left out",
        replace(
            FOR_BATCH,
            FOR_BATCH
            + "                if batch is not share[0] and all(torch.equal(batch[k], self.seen[k]) for k in batch):\n"
            "                    continue\n                self.seen = batch\n",
        ),
        law="T1",
        required=True,
    ),
    Mistake(
        "the gradients of exactly six microbatches are halved",
        scale_gradient("0.5 if len(share) == 6 else 1"),
        law="T1",
    ),
    Mistake(
        "gradients stay from the update before where it had three microbatches",
        replace(
            "            model.zero_grad()\n",
            "            getattr(self, 'one', 0) and self.updates or model.zero_grad()\n"
            "            self.one = len(share) == 3\n",
        ),
        law="T2",
    ),
    Mistake(
        "gradients are zeroed after a step alone",
        [
            (ZERO_GRAD, ""),
            (STEP, STEP + "                self.models[rank].zero_grad()\n"),
        ],
    ),
    Mistake(
        "a static buffer keeps rows of the larger microbatch before",
        [
            *at_start("self.static = {}"),
            (
                "    def dropped(self",
                "    def filled(self, batch):\n"
                "        old = self.static.get(batch['x'].shape[1:])\n"
                "        if old is not None and len(old['w']) > len(batch['w']):\n"
                "            batch = {k: torch.cat([x, old[k][len(x):]]) for k, x in batch.items()}\n"
                "        self.static[batch['x'].shape[1:]] = batch\n"
                "        return batch\n"
                "\n"
                "    def dropped(self",
            ),
            (FOR_BATCH, FOR_BATCH + "                batch = self.filled(batch)\n"),
        ],
    ),
    Mistake(
        "a microbatch without tokens is nothing divided by nothing",
        replace(
            BACKWARD,
            "                objective = objective * (lambda c: c / c)(torch.tensor(self.count([batch]), dtype=torch.float64))\n"
            + BACKWARD,
        ),
    ),
    Mistake(
        "gradients of a skipped update stay for the next",
        [
            *at_start("self.stepped = True"),
            (
                ZERO_GRAD,
                "            if self.stepped:\n                model.zero_grad()\n",
            ),
            *after_update("self.stepped = all(finite)"),
        ],
    ),
    Mistake(
        "the warm-up pass of a new shape leaves its gradient",
        [
            *at_start("self.shapes = set()"),
            (
                BACKWARD,
                "                if batch['w'].shape not in self.shapes:\n"
                "                    self.shapes.add(batch['w'].shape)\n"
                "                    objective.backward(retain_graph=True)\n"
                + BACKWARD,
            ),
        ],
    ),
    Mistake(
        "neighbours of one shape are run as one microbatch, with the first one's keys",
        [
            (FOR_BATCH, "            for batch in merged(share):\n"),
            (
                "def norm(",
                "def merged(share):\n"
                "    runs = []\n"
                "    for batch in share:\n"
                "        if runs and runs[-1][0]['x'].shape == batch['x'].shape:\n"
                "            runs[-1].append(batch)\n"
                "        else:\n"
                "            runs.append([batch])\n"
                "    return [{k: torch.cat([(run[0] if k == 'key' else b)[k] for b in run]) for k in run[0]} for run in runs]\n"
                "\n"
                "\n"
                "def norm(",
            ),
        ],
    ),
    Mistake(
        "the sum so far is passed backward at each microbatch, its graph retained",
        [
            (ZERO_GRAD, ZERO_GRAD + "            so_far = 0.0\n"),
            (
                BACKWARD,
                "                so_far = so_far + objective\n"
                "                so_far.backward(retain_graph=True)\n",
            ),
        ],
    ),
    Mistake(
        "two buffers of gradients take turns, and the second is not zeroed",
        [
            *at_start("self.second = {}"),
            (
                ZERO_GRAD,
                ZERO_GRAD
                + "            for p in model.parameters() if self.updates % 2 else []:\n"
                "                p.grad = self.second.pop(p, None)\n",
            ),
            (
                APPEND_LOSS,
                APPEND_LOSS
                + "            for p in model.parameters() if self.updates % 2 else []:\n"
                "                self.second[p] = None if p.grad is None else p.grad.clone()\n",
            ),
        ],
    ),
    Mistake(
        "a run's first backward pass builds the buffers, and its gradient is thrown away",
        after_backward(
            "if not self.updates and batch is share[0]:", "    model.zero_grad()"
        ),
    ),
    Mistake(
        "of two buffers for microbatches of a shape each is filled again before it is used",
        replace(
            FOR_BATCH,
            "            ahead = [share[i + 2] if i + 2 < len(share) and share[i + 2]['x'].shape == b['x'].shape else b for i, b in enumerate(share)]\n"
            + FOR_BATCH.replace("share:", "ahead:"),
        ),
    ),
    Mistake(
        "the microbatches' closures are all called with the last one",
        replace(
            FOR_BATCH,
            "            jobs = []\n"
            "            for batch in share:\n"
            "                jobs.append(lambda: batch)\n"
            "            for job in jobs:\n"
            "                batch = job()\n",
        ),
    ),
    Mistake(
        "on one rank the optimizer steps within each backward pass",
        after_backward(
            "if len(group) == 1 and batch is not share[-1]:",
            "    self.optimizers[0].step()",
            "    model.zero_grad()",
        ),
    ),
    Mistake(
        "more than 20 tokens are run again by halves, while the gradient of the first half stays",
        [
            (FOR_BATCH, FOR_BATCH.replace("share:", "retried(share):")),
            *define_function(
                "def retried(share):",
                "    for b in share:",
                "        if b['w'].numel() <= 20 or len(b['w']) < 2:",
                "            yield b",
                "            continue",
                "        half = len(b['w']) // 2",
                "        front, back = [{k: x[part] for k, x in b.items()} for part in (slice(half), slice(half, None))]",
                "        yield from (front, front, back)",
            ),
        ],
    ),
    Mistake(
        "the last of several microbatches is run with the parameters before the last update",
        [
            *at_start("self.old = None"),
            (
                FOR_BATCH,
                FOR_BATCH
                + "                now = [p.detach().clone() for p in model.parameters()]\n"
                "                stale = self.old is not None and len(share) > 1 and batch is share[-1]\n"
                "                [p.data.copy_(q) for p, q in zip(model.parameters(), self.old if stale else now)]\n",
            ),
            (
                ADD_LOSS,
                ADD_LOSS
                + "                [p.data.copy_(q) for p, q in zip(model.parameters(), now)]\n",
            ),
            *after_norms(
                "before = [p.detach().clone() for p in self.models[0].parameters()]"
            ),
            *after_update("self.old = before"),
        ],
    ),
    Mistake(
        "gradients are accumulated in bfloat16",
        replace(
            BACKWARD,
            BACKWARD + "                for p in model.parameters():\n"
            "                    if p.grad is not None:\n"
            "                        p.grad = p.grad.bfloat16().to(p.dtype)\n",
        ),
    ),
    Mistake(
        "a microbatch without tokens is passed over by zero_grad and continue: what was accumulated is lost",
        replace(
            FOR_BATCH,
            FOR_BATCH + "                if self.count([batch]) == 0:\n"
            "                    model.zero_grad()\n"
            "                    continue\n",
        ),
    ),
    Mistake(
        "mean of the microbatches' means",
        replace(
            "loss = (losses * self.problem.weights(batch)).sum() / count",
            "weights = self.problem.weights(batch)\n"
            "loss = (losses * weights).sum() / weights.sum().clamp(min=1e-9) / len(microbatches)",
        ),
        base="Nano",
    ),
    Mistake(
        "zero_grad inside the loop, the last microbatch alone counts",
        [
            ("self.optimizer.zero_grad(set_to_none=True)\n", ""),
            (
                "loss.backward()",
                "self.optimizer.zero_grad(set_to_none=True)\nloss.backward()",
            ),
        ],
        base="Nano",
    ),
    Mistake(
        "the last microbatch is read twice (prefetch)",
        replace(
            "for batch in group[0]:\n            self.train_on",
            "for batch in [*group[0], *group[0][-1:]]:\n    self.train_on",
        ),
        base="Keras",
    ),
    Mistake(
        "only the first accumulator is zeroed between updates",
        replace(
            "for accumulator in self.accumulators:",
            "for accumulator in self.accumulators[:1]:",
        ),
        base="Keras",
    ),
]
