"""Seventy mistakes in the loop by hand, written without a look at what the kit draws. The kit found 64 of them at once.

    python -m benchmarks.unseen

They are mistakes that people make, and that trainers had: of windows, ranks, padding, denominators, skips, clips, evaluation, saving and noise.
"""

import torch

from benchmarks.kit import (
    KEYS,
    STEP,
    after_update,
    before_step,
    findings,
    guarded,
    of_batch,
    of_weights,
    scaled,
)
from proofs.plain_mutants import (
    BACKWARD,
    EACH,
    GUARD,
    REDUCED,
    TOTAL,
    WEIGHTS,
    objective,
)

START = "        self.updates = 0\n"
ZEROED = "            model.zero_grad()\n"
ITEM = "                loss += objective.item()\n"
FINITE = 'finite = [n < float("inf") for n in norms]'
GIVEN = "            for p in params:\n                p.grad = whole.clone()\n"
PRODUCT = "weights * losses, 0"
NORM = '"grad_norm": norms[rank],'
LOSS = '"loss": sum(sums),'
TOKENS = '"num_tokens": total'
OVER = "        total = sum(self.count(share) for share in group)\n"
SAVED = "        return copy.deepcopy((self.models, [o.state_dict() for o in self.optimizers], self.updates))\n"
LOADED = "            optimizer.load_state_dict(state)\n"
SEEDED = "generator = torch.Generator().manual_seed(1000 * key + column)"


def at_start(line: str) -> list[tuple[str, str]]:
    """A line where the first update has not begun."""
    return [(START, START + f"        {line}\n")]


def regrouped(expression: str) -> list[tuple[str, str]]:
    """Another group than the one that is passed."""
    return [("        counts = [", f"        group = {expression}\n        counts = [")]


UNSEEN: list[tuple[str, str, list[tuple[str, str]]]] = [
    # accumulation: windows, zeroing, steps
    (
        "",
        "only the first rank zeroes its gradients",
        [
            (
                ZEROED,
                "            if model is self.models[0]:\n                model.zero_grad()\n",
            )
        ],
    ),
    (
        "",
        "gradients are zeroed after a step alone",
        [
            (ZEROED, ""),
            (STEP, STEP + "                self.models[rank].zero_grad()\n"),
        ],
    ),
    (
        "",
        "a group shorter than the first makes no step",
        [
            *at_start("self.full = 0"),
            (TOTAL, TOTAL + "        self.full = self.full or max(map(len, group))\n"),
            *guarded("max(map(len, group)) >= self.full"),
        ],
    ),
    (
        "",
        "microbatches beyond the number of the first group are left out",
        at_start("self.full = 0")
        + regrouped("[share[: self.full or len(share)] for share in group]")
        + after_update("self.full = self.full or max(map(len, group))"),
    ),
    (
        "",
        "more than four microbatches make two updates",
        [
            (
                "        counts = [",
                "        if max(map(len, group), default=0) > 4:\n            self.update([share[:4] for share in group])\n            group = [share[4:] for share in group]\n        counts = [",
            )
        ],
    ),
    (
        "",
        "the learning rate warms up over microbatches",
        [
            *at_start("self.seen = 0"),
            (TOTAL, TOTAL + "        self.seen += max(map(len, group))\n"),
            *before_step(
                "[g.update(lr=self.problem.learning_rate * min(1, self.seen / 2)) for g in optimizer.param_groups]"
            ),
        ],
    ),
    (
        "",
        "a static buffer keeps rows of the larger microbatch before",
        [
            *at_start("self.static = {}"),
            (
                "    def dropped(self",
                "    def filled(self, batch):\n        old = self.static.get(batch['x'].shape[1:])\n        if old is not None and len(old['w']) > len(batch['w']):\n            batch = {k: torch.cat([x, old[k][len(x):]]) for k, x in batch.items()}\n        self.static[batch['x'].shape[1:]] = batch\n        return batch\n\n    def dropped(self",
            ),
            (EACH, EACH + "                batch = self.filled(batch)\n"),
        ],
    ),
    (
        "",
        "a microbatch without tokens is nothing divided by nothing",
        [
            (
                BACKWARD,
                "                objective = objective * (lambda c: c / c)(torch.tensor(self.count([batch]), dtype=torch.float64))\n"
                + BACKWARD,
            )
        ],
    ),
    # ranks
    (
        "",
        "what is reduced is reduced again at each microbatch",
        scaled("len(group) ** (max(map(len, group)) - 1 - at)"),
    ),
    (
        "",
        "the last microbatch alone is reduced",
        [
            (
                ZEROED,
                ZEROED
                + "            for p in model.parameters():\n                p.early = torch.zeros_like(p)\n",
            ),
            (
                EACH,
                "            for at, batch in enumerate(share):\n                if 0 < at == len(share) - 1:\n                    for p in model.parameters():\n                        p.early, p.grad = p.grad, None\n",
            ),
            (
                "                p.grad = whole.clone()\n",
                "                p.grad = whole + p.early\n",
            ),
        ],
    ),
    (
        "",
        "elements beyond a multiple of the ranks are not reduced",
        [
            (
                GIVEN,
                "            for p, own in zip(params, grads):\n                cut = p.numel() // len(grads) * len(grads)\n                p.grad = torch.cat([whole.flatten()[:cut], own.flatten()[cut:]]).view_as(p)\n",
            )
        ],
    ),
    (
        "",
        "the last leaf's bucket comes an update late",
        [
            *at_start("self.late = None"),
            (
                REDUCED,
                REDUCED
                + "\n            if len(grads) > 1 and params[0] is [*self.models[0].parameters()][-1]:\n                self.late, whole = whole, whole if self.late is None else self.late",
            ),
        ],
    ),
    ("", "a rank without microbatches does not step", guarded("len(group[rank]) > 0")),
    (
        "",
        "the mean is over ranks that have tokens",
        [
            (
                REDUCED,
                "whole = torch.stack(grads).sum(0) * (len(grads) / max(1, sum(c > 0 for c in counts)))",
            )
        ],
    ),
    ("", "no step where a rank has no tokens", guarded("min(counts) > 0")),
    (
        "",
        "ranks stop when the first of them has no more",
        regrouped("[share[: min(map(len, group))] for share in group]"),
    ),
    (
        "",
        "ranks with fewer microbatches begin again",
        regrouped(
            "[[share[i % len(share)] for i in range(max(map(len, group)))] if share else [] for share in group]"
        ),
    ),
    (
        "",
        "microbatches are dealt out evenly and the rest is dropped",
        regrouped(
            "[[b for share in group for b in share][i * (sum(map(len, group)) // len(group)):(i + 1) * (sum(map(len, group)) // len(group))] for i in range(len(group))]"
        ),
    ),
    # what is not finite
    (
        "",
        "the loss scale falls after a skip but is not undone so",
        [
            *at_start("self.scale = 65536.0"),
            (BACKWARD, "                (objective * self.scale).backward()\n"),
            (REDUCED, "whole = torch.stack(grads).sum(0) / 65536.0"),
            *after_update("self.scale *= 1.0 if all(finite) else 0.5"),
        ],
    ),
    ("", "a skip looks for NaN alone", [(FINITE, "finite = [n == n for n in norms]")]),
    (
        "",
        "a skip looks for infinity alone",
        [(FINITE, 'finite = [n != float("inf") for n in norms]')],
    ),
    (
        "",
        "a microbatch whose loss is not finite is left out",
        [
            (
                BACKWARD,
                "                if not torch.isfinite(objective):\n                    continue\n"
                + BACKWARD,
            )
        ],
    ),
    (
        "",
        "what is not finite in a gradient is zeroed",
        [
            (
                REDUCED,
                "whole = torch.nan_to_num(torch.stack(grads).sum(0), 0.0, 0.0, 0.0)",
            )
        ],
    ),
    (
        "",
        "each rank skips by its own gradients",
        [
            (
                "        for params in zip(",
                "        own = [all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters()) for model in self.models]\n        for params in zip(",
            ),
            (GUARD, "if total > 0 and own[rank]:"),
        ],
    ),
    (
        "",
        "the update after a skipped one is skipped",
        at_start("self.found = False")
        + guarded("not self.found")
        + after_update("self.found = not all(finite)"),
    ),
    (
        "",
        "no step where the loss is ten times that before",
        at_start("self.last = 0.0")
        + guarded("not (self.updates and sum(sums) > 10 * self.last)")
        + after_update("self.last = sum(sums)"),
    ),
    # losses, weights, denominators
    ("", "losses are rounded to float32", [(PRODUCT, "weights * losses.float(), 0")]),
    ("", "a small number is added to the denominator", objective("total + 1e-8")),
    (
        "",
        "the mean of the rows' means",
        of_weights("weights / weights.double().sum(1, keepdim=True).clamp(min=1e-300)"),
    ),
    (
        "",
        "the mean count of the ranks is rounded down",
        objective(
            "total if len(group) == 1 else len(group) * max(1, total // len(group))"
        ),
    ),
    (
        "",
        "a token whose loss is zero is not counted",
        [
            (
                TOTAL,
                TOTAL
                + "        with torch.no_grad():\n            total -= sum(float((self.problem.weights(b) * (self.problem.losses(m, self.dropped(b)) == 0)).sum()) for m, s in zip(self.models, group) for b in s)\n",
            )
        ],
    ),
    (
        "",
        "a token whose target is zero is taken for padding",
        of_weights("weights * (batch['y'] != 0)"),
    ),
    (
        "",
        "a row ends at its first ignored token",
        of_weights("weights * (weights > 0).long().cumprod(1)"),
    ),
    (
        "",
        "a row's largest weight is that of all its tokens",
        of_weights(
            "torch.where(weights > 0, weights.double().amax(1, keepdim=True), 0)"
        ),
    ),
    (
        "",
        "the weights of a square microbatch are transposed",
        of_weights("weights.T if weights.shape[0] == weights.shape[1] else weights"),
    ),
    (
        "",
        "weights sorted by length are put back by the same order",
        of_weights(
            "(lambda order: weights[order][order])((weights > 0).sum(1).argsort(stable=True))"
        ),
    ),
    (
        "",
        "rows of more than three quarters padding are left out",
        of_weights("weights * ((weights > 0).double().mean(1, keepdim=True) >= 0.25)"),
    ),
    (
        "",
        "rows halved for two chunks lose an odd column",
        of_batch(KEYS % "[:, :max(1, x.shape[1] // 2 * 2)]"),
    ),
    (
        "",
        "where nothing is ignored weights are not applied",
        of_weights("weights if not weights.all() else torch.ones_like(weights)"),
    ),
    (
        "",
        "weights have mean one in each microbatch",
        of_weights(
            "weights * ((weights > 0).sum() / weights.double().sum().clamp(min=1e-300))"
        ),
    ),
    ("", "weights are applied twice", [(PRODUCT, "weights * weights * losses, 0")]),
    (
        "",
        "weights are a mask for the losses alone",
        [(WEIGHTS, WEIGHTS + "\n        weights = (weights > 0).double()")],
    ),
    (
        "",
        "the first token of an ignored microbatch counts",
        of_weights(
            "weights if weights.any() else weights + (torch.arange(weights.numel()).view_as(weights) == 0)"
        ),
    ),
    (
        "",
        "the first row's mask is that of all rows",
        of_weights("weights * (weights[:1] > 0)"),
    ),
    (
        "",
        "weights of one column lose a dimension",
        [(WEIGHTS, WEIGHTS + ".squeeze(-1)")],
    ),
    (
        "",
        "ignored tokens weigh a little",
        of_weights("weights.double().clamp(min=1e-8)"),
    ),
    (
        "",
        "a weight other than one is taken for ignored",
        of_weights("weights * (weights == 1)"),
    ),
    # optimizer
    (
        "",
        "weight decay is decoupled",
        before_step(
            "[g.update(weight_decay=0) for g in optimizer.param_groups], [p.data.mul_(1 - self.problem.learning_rate * self.problem.weight_decay) for p in self.models[rank].parameters()]"
        ),
    ),
    (
        "",
        "a leaf whose gradient is zero is not stepped",
        before_step(
            "[setattr(p, 'grad', None) for p in self.models[rank].parameters() if not p.grad.any()]"
        ),
    ),
    # evaluation
    (
        "",
        "evaluation drops a last batch that is not full",
        [
            (
                OVER,
                "        rows = max(len(b['w']) for share in group for b in share)\n        group = [[b for b in share if b is not share[-1] or len(b['w']) == rows] for share in group]\n"
                + OVER,
            ),
            (
                "        return sum(sums) / total",
                "        return sum(sums) / max(total, 1e-300)",
            ),
        ],
    ),
    (
        "",
        "evaluation keeps its first count",
        [
            *at_start("self.tokens = 0.0"),
            (
                OVER,
                "        total = self.tokens = self.tokens or sum(self.count(share) for share in group)\n",
            ),
        ],
    ),
    (
        "",
        "evaluation adds up in float32",
        [
            (
                "return sum(sums) / total",
                "return float(torch.tensor(sums).sum() / total)",
            )
        ],
    ),
    (
        "",
        "evaluation is of a copy made once",
        [
            *at_start("self.shown = None"),
            (
                OVER,
                OVER
                + "        self.shown = copy.deepcopy(self.models[0]) if self.shown is None else self.shown\n",
            ),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    # reports
    (
        "",
        "the loss is reported of the last microbatch",
        [(ITEM, ITEM.replace("+=", "="))],
    ),
    (
        "",
        "the loss is reported of the first rank's tokens",
        [(LOSS, '"loss": sums[0] * total / max(counts[0], 1e-300),')],
    ),
    (
        "",
        "the norm is reported of the update before",
        [
            *at_start("self.norm = None"),
            (NORM, '"grad_norm": norms[rank] if self.norm is None else self.norm,'),
            *after_update("self.norm = norms[0]"),
        ],
    ),
    (
        "",
        "the bias is in the norm once for each rank",
        [
            (
                NORM,
                '"grad_norm": norms[rank] if len(group) == 1 else float(sum(p.grad.square().sum() * (1 if p.ndim else len(group)) for p in self.models[rank].parameters()).sqrt()),',
            )
        ],
    ),
    (
        "",
        "the number of tokens is reported, not their weight",
        [
            (
                TOKENS,
                '"num_tokens": float(sum((self.problem.weights(b) > 0).sum() for s in group for b in s))',
            )
        ],
    ),
    (
        "",
        "a rank without microbatches reports what it did before",
        [
            (
                "            self.reports[rank] = said\n",
                "            if group[rank] or not self.updates:\n                self.reports[rank] = said\n",
            )
        ],
    ),
    # resume
    (
        "",
        "the optimizers keep the parameters from before a load",
        [
            (
                "        self.optimizers = [self.problem.optimizer(model) for model in self.models]\n        for optimizer, state",
                "        for optimizer, state",
            )
        ],
    ),
    (
        "",
        "the first update after a load is taken to be done",
        at_start("self.resumed = False")
        + guarded("not self.resumed")
        + after_update("self.resumed = False")
        + [(LOADED, LOADED + "        self.resumed = True\n")],
    ),
    (
        "",
        "saving frees the momentum",
        [
            (
                SAVED,
                SAVED.replace("return", "saved =")
                + "        [o.state.clear() for o in self.optimizers]\n        return saved\n",
            )
        ],
    ),
    # randomness
    (
        "",
        "noise follows the number of the update, which a load forgets",
        [
            (
                "manual_seed(1000 * key + column)",
                "manual_seed(1000 * key + column + 7919 * self.updates)",
            ),
            (
                "self.models, states, self.updates = copy.deepcopy(saved)",
                "self.models, states, _ = copy.deepcopy(saved)",
            ),
        ],
    ),
    (
        "",
        "noise seeds the global generator",
        [(SEEDED, "generator = torch.manual_seed(1000 * key + column)")],
    ),
    (
        "",
        "noise comes from one generator that goes on",
        [
            *at_start("self.generator = torch.Generator().manual_seed(0)"),
            (SEEDED, "generator = self.generator"),
        ],
    ),
    (
        "",
        "keys sorted by length are not put back",
        [
            (
                'key = int(batch["key"][row])',
                'key = int(batch["key"][(batch["w"] > 0).sum(1).argsort(stable=True, descending=True)][row])',
            )
        ],
    ),
    # what belongs to the caller
    (
        "",
        "elements are dropped in the caller's batch",
        [('x = batch["x"].clone()', 'x = batch["x"]')],
    ),
    (
        "",
        "the key is taken out of the caller's batch",
        [(BACKWARD, BACKWARD + "                batch.pop('key', None)\n")],
    ),
    (
        "",
        "the caller's inputs are made to require grad",
        [(EACH, EACH + "                batch['x'].requires_grad_()\n")],
    ),
    (
        "",
        "the caller's microbatches are sorted in place",
        [
            (
                EACH,
                "            if isinstance(share, list):\n                share.sort(key=lambda batch: batch['w'].shape[1])\n"
                + EACH,
            )
        ],
    ),
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    findings(UNSEEN)
