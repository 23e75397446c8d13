"""Mistakes that trainers' issue trackers tell of, put into the loop by hand blind: without a look at what the kit draws."""

import torch

from benchmarks.kit import APPEND, COUNTED, DONE, STEP, findings
from benchmarks.unseen import GIVEN, START, ZEROED
from benchmarks.unseen_third import SUMS
from proofs.plain_mutants import BACKWARD, EACH, GUARD, TOTAL

Edited = list[tuple[str, str, list[tuple[str, str]]]]

TOP = "        counts = ["
LOSS = "            loss = 0.0\n"
DIVISOR = "max(total, 1e-300)"
PARAMS = (
    "for params in zip(*[model.parameters() for model in self.models], strict=True):\n"
)
WHOLE = "torch.stack(grads).sum(0)"
NORMS = "        norms = [norm(model) for model in self.models]\n"
FINITE = '        finite = [n < float("inf") for n in norms]\n'
WEIGHTS = "        weights = self.problem.weights(batch).to(torch.float64)\n"
WHERE = "        return torch.where(weights > 0, weights * losses, 0).sum()\n"
RESULT = "        return sum(sums) / total\n"
LOADED = "        self.models, states, self.updates = copy.deepcopy(saved)\n"
REBUILD = "        self.optimizers = [self.problem.optimizer(model) for model in self.models]\n"
SEED = "1000 * key + column"

WINDOWS: Edited = [
    (
        "",
        "gradients are zeroed only after a step was taken, so those of a skipped update leak into the next",
        [(ZEROED, ""), (STEP, STEP + "                optimizer.zero_grad()\n")],
    ),
    (
        "",
        "mean of the microbatches' means, then mean over ranks",
        [(DIVISOR, "max(self.count([batch]), 1e-300) / len(share) / len(group)")],
    ),
    (
        "",
        "the divisor is extrapolated: tokens of each rank's first microbatch times its number of microbatches",
        [
            (
                SUMS,
                "        guess = sum(self.count(share[:1]) * len(share) for share in group)\n"
                + SUMS,
            ),
            (DIVISOR, "max(guess or total, 1e-300)"),
        ],
    ),
    (
        "",
        "the window's size is learnt from the first group; microbatches beyond it are dropped later",
        [
            (START, START + "        self.window = 0\n"),
            (
                TOP,
                "        self.window = self.window or max(map(len, group))\n"
                "        group = [share[: self.window] for share in group]\n" + TOP,
            ),
        ],
    ),
    (
        "",
        "steps after every two microbatches and once more for the remainder",
        [
            (
                TOP,
                "        if max(map(len, group)) > 2:\n"
                "            self.update([share[:2] for share in group])\n"
                "            return self.update([share[2:] for share in group])\n"
                + TOP,
            ),
        ],
    ),
    (
        "",
        "boundary off by one: a group's last microbatch is taken into the next update's window",
        [
            (START, START + "        self.late = [[] for _ in range(ranks)]\n"),
            (
                TOP,
                "        late, self.late = self.late, [share[-1:] for share in group]\n"
                "        group = [[*old, *share[:-1]] for old, share in zip(late, group, strict=True)]\n"
                + TOP,
            ),
        ],
    ),
    (
        "",
        "breaks out of the window at a microbatch without tokens",
        [
            (
                EACH,
                EACH
                + "                if self.count([batch]) == 0:\n                    break\n",
            )
        ],
    ),
    (
        "",
        "each microbatch is divided by the tokens seen so far on its rank, not by all",
        [
            (LOSS, "            loss = seen = 0.0\n"),
            (EACH, EACH + "                seen += self.count([batch])\n"),
            (DIVISOR, "max(seen, 1e-300) / len(group)"),
        ],
    ),
    (
        "",
        "the first microbatch of the first update is used up by a peek and not trained on",
        [(EACH, "            for batch in share[self.updates == 0 :]:\n")],
    ),
    (
        "",
        "gradients are accumulated in bfloat16",
        [
            (
                BACKWARD,
                BACKWARD + "                for p in model.parameters():\n"
                "                    if p.grad is not None:\n"
                "                        p.grad = p.grad.bfloat16().to(p.dtype)\n",
            ),
        ],
    ),
    (
        "",
        "the divisor lags: the last update's number of tokens is used",
        [
            (START, START + "        self.divisor = 0.0\n"),
            (
                SUMS,
                "        divisor, self.divisor = self.divisor or total, total\n" + SUMS,
            ),
            (DIVISOR, "max(divisor, 1e-300)"),
        ],
    ),
    (
        "",
        "a microbatch without tokens is passed over by zero_grad and continue: what was accumulated is lost",
        [
            (
                EACH,
                EACH + "                if self.count([batch]) == 0:\n"
                "                    model.zero_grad()\n"
                "                    continue\n",
            ),
        ],
    ),
]

RANKS: Edited = [
    (
        "",
        "gradients are averaged over ranks though the divisor is already the global one",
        [(WHOLE, "torch.stack(grads).mean(0)")],
    ),
    (
        "",
        "the mean over all ranks is undone by the number of ranks that have tokens",
        [(WHOLE, "torch.stack(grads).mean(0) * sum(map(bool, counts))")],
    ),
    (
        "",
        "every rank divides by its own tokens and ranks are averaged",
        [(DIVISOR, "max(counts[len(sums)], 1e-300) / len(group)")],
    ),
    (
        "",
        "only the first bucket (parameter) is reduced over ranks",
        [
            (
                PARAMS,
                "for params in [*zip(*[model.parameters() for model in self.models], strict=True)][:1]:\n",
            )
        ],
    ),
    (
        "",
        "reduce to rank 0 in place of all-reduce: other ranks step with their own gradients",
        [
            (
                GIVEN,
                "            for p, grad in zip(params, [whole, *grads[1:]], strict=True):\n"
                "                p.grad = grad\n",
            ),
        ],
    ),
    (
        "",
        "a rank without microbatches does not step",
        [(GUARD, "if total > 0 and finite[rank] and len(group[rank]) > 0:")],
    ),
    (
        "",
        "ranks with fewer microbatches repeat their last one until all have the same number",
        [
            (
                TOP,
                "        longest = max(map(len, group))\n"
                "        group = [[*share, *list(share[-1:]) * (longest - len(share))] for share in group]\n"
                + TOP,
            ),
        ],
    ),
    (
        "",
        "all ranks stop at the end of the shortest share",
        [
            (
                TOP,
                "        shortest = min(map(len, group))\n"
                "        group = [share[:shortest] for share in group]\n" + TOP,
            ),
        ],
    ),
    (
        "",
        "the number of tokens is rank 0's times the number of ranks",
        [(TOTAL, "        total = counts[0] * len(counts)\n")],
    ),
    (
        "",
        "no_sync is missing: accumulated gradients are summed over ranks again after each microbatch",
        [
            (SUMS, "        longest = max(map(len, group))\n" + SUMS),
            (EACH, "            for step, batch in enumerate(share):\n"),
            (
                BACKWARD,
                "                (objective * len(group) ** (longest - 1 - step)).backward()\n",
            ),
        ],
    ),
    (
        "",
        "no_sync goes wrong: only the last microbatch's gradients are reduced, earlier ones stay local",
        [
            (SUMS, "        sums, kept = [], []\n"),
            (LOSS, "            loss, own = 0.0, [None for _ in model.parameters()]\n"),
            (
                EACH,
                "            for step, batch in enumerate(share):\n"
                "                if step == len(share) - 1:\n"
                "                    own = [p.grad for p in model.parameters()]\n"
                "                    model.zero_grad()\n",
            ),
            (APPEND, APPEND + "            kept.append(own)\n"),
            (
                PARAMS,
                "for params, owns in zip(zip(*[model.parameters() for model in self.models]), zip(*kept), strict=True):\n",
            ),
            (
                GIVEN,
                "            for p, own in zip(params, owns, strict=True):\n"
                "                p.grad = whole.clone() if own is None else whole + own\n",
            ),
        ],
    ),
    (
        "",
        "if any rank has no microbatch, and so no gradient, the reduction is left out on all",
        [
            (
                GIVEN,
                "            for p, own in zip(params, grads, strict=True):\n"
                "                p.grad = whole.clone() if all(len(share) > 0 for share in group) else own\n",
            ),
        ],
    ),
]

TOKENS: Edited = [
    (
        "",
        "the divisor is at least one, though weights may add up to less",
        [(DIVISOR, "max(total, 1.0)")],
    ),
    (
        "",
        "tokens of positive weight are counted, not their weights added",
        [(COUNTED, "(self.problem.weights(batch) > 0).sum()")],
    ),
    (
        "",
        "each microbatch's weights are truncated to an integer",
        [(COUNTED, "int(self.problem.weights(batch).sum())")],
    ),
    (
        "",
        "weights are added up in bfloat16",
        [(COUNTED, "self.problem.weights(batch).to(torch.bfloat16).sum()")],
    ),
    (
        "",
        "the count is taken after a label shift that the loss does not make (without the first column)",
        [(COUNTED, "self.problem.weights(batch)[..., 1:].sum()")],
    ),
    (
        "",
        "all rows of a microbatch weigh the same, however many tokens they have",
        [
            (
                WEIGHTS,
                WEIGHTS + "        rows = weights.sum(-1, keepdim=True)\n"
                "        weights = weights / rows.clamp_min(1e-300) * rows.mean()\n",
            ),
        ],
    ),
    (
        "",
        "columns are cropped to the largest number of tokens in a row, as if there were neither holes nor left padding",
        [
            (
                WHERE,
                "        longest = max((weights > 0).sum(-1).tolist(), default=0)\n"
                "        weights, losses = weights[:, :longest], losses[:, :longest]\n"
                + WHERE,
            ),
        ],
    ),
    (
        "",
        "the loss goes through chunks of two columns and leaves out the remainder",
        [
            (
                WHERE,
                "        whole = losses.shape[-1] // 2 * 2\n"
                "        weights, losses = weights[:, :whole], losses[:, :whole]\n"
                + WHERE,
            ),
        ],
    ),
    (
        "",
        "weights are cached by the batch's shape",
        [
            (START, START + "        self.masks = {}\n"),
            (
                WEIGHTS,
                WEIGHTS
                + '        weights = self.masks.setdefault(batch["x"].shape, weights.clone())\n',
            ),
        ],
    ),
    (
        "",
        "padding is the end token: each row's last token is masked from the loss but counted",
        [
            (
                WEIGHTS,
                WEIGHTS + "        seen = (weights > 0).cumsum(-1)\n"
                "        weights = weights * (seen < seen[..., -1:])\n",
            ),
        ],
    ),
    (
        "",
        "weights are normalized to a mean of one in each microbatch on its own",
        [
            (
                SUMS,
                "        def tokens(share):\n"
                "            return float(sum((self.problem.weights(batch) > 0).sum() for batch in share))\n\n"
                "        active = sum(tokens(share) for share in group)\n" + SUMS,
            ),
            (
                DIVISOR,
                "max(self.count([batch]), 1e-300) * tokens([batch]) / max(active, 1)",
            ),
        ],
    ),
    (
        "",
        "all microbatches are cut to the length of the group's first one",
        [
            (
                TOP,
                '        length = next((b["x"].shape[1] for share in group for b in share), 0)\n'
                "        group = [\n"
                "            [{k: v[:, :length] if v.dim() > 1 else v for k, v in b.items()} for b in share]\n"
                "            for share in group\n"
                "        ]\n" + TOP,
            ),
        ],
    ),
]

STEPS: Edited = [
    (
        "",
        "gradients are clipped by a default norm of 0.5 that nobody asked for",
        [
            (
                NORMS,
                NORMS.replace(
                    "norm(model)",
                    "float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))",
                ),
            )
        ],
    ),
    (
        "",
        "local gradients are clipped after every microbatch, before the reduction",
        [
            (
                BACKWARD,
                BACKWARD
                + "                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            )
        ],
    ),
    (
        "",
        "each rank looks for nonfinite gradients before the reduction and skips on its own",
        [
            (SUMS, "        sums, finite = [], []\n"),
            (
                APPEND,
                APPEND
                + "            grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                "            finite.append(all(bool(grad.isfinite().all()) for grad in grads))\n",
            ),
            (FINITE, ""),
        ],
    ),
    (
        "",
        "nonfinite gradients are replaced by zeros and the step is taken",
        [(WHOLE, WHOLE + ".nan_to_num(0.0, 0.0, 0.0)")],
    ),
    (
        "",
        "a group without tokens steps: momentum and weight decay act",
        [(GUARD, "if finite[rank]:")],
    ),
    (
        "",
        "a nonfinite update zeroes its gradients and steps all the same: momentum and weight decay act",
        [
            (
                STEP,
                STEP + "            elif total > 0:\n"
                "                optimizer.zero_grad(set_to_none=False)\n"
                "                optimizer.step()\n",
            ),
        ],
    ),
    (
        "",
        "a rank with nonfinite gradients throws away its own share and the others' update goes on",
        [
            (
                APPEND,
                APPEND
                + "            grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                "            if not all(bool(grad.isfinite().all()) for grad in grads):\n"
                "                model.zero_grad()\n",
            ),
        ],
    ),
    (
        "",
        "the loss scale is halved after a nonfinite update, but gradients are unscaled by the old one",
        [
            (START, START + "        self.scale = 1.0\n"),
            (BACKWARD, "                (objective * self.scale).backward()\n"),
            (DONE, DONE + "        if not all(finite):\n            self.scale /= 2\n"),
        ],
    ),
    (
        "",
        "weight decay is added once more for every microbatch after the first",
        [
            (EACH, "            for step, batch in enumerate(share):\n"),
            (
                BACKWARD,
                '                decay = self.optimizers[len(sums)].param_groups[0]["weight_decay"] / 2 * (step > 0)\n'
                "                (objective + decay * sum(p.square().sum() for p in model.parameters())).backward()\n",
            ),
        ],
    ),
    (
        "",
        "the optimizers are rebuilt after a nonfinite update and lose their momentum",
        [(DONE, DONE + "        if not all(finite):\n    " + REBUILD)],
    ),
    (
        "",
        "the learning rate is multiplied by the number of ranks",
        [
            (
                START,
                START + "        for optimizer in self.optimizers:\n"
                "            for options in optimizer.param_groups:\n"
                '                options["lr"] *= ranks\n',
            ),
        ],
    ),
    (
        "",
        "the overflow flag is never cleared: after one nonfinite update all are skipped",
        [
            (START, START + "        self.overflow = False\n"),
            (
                FINITE,
                '        self.overflow = self.overflow or not all(n < float("inf") for n in norms)\n'
                "        finite = [not self.overflow for _ in norms]\n",
            ),
        ],
    ),
]

METRICS: Edited = [
    (
        "",
        "evaluation averages the batches' means",
        [
            (
                RESULT,
                "        means = [s / max(self.count([b]), 1e-300) for s, b in zip(sums, batches, strict=True)]\n"
                "        return sum(means) / len(means)\n",
            ),
        ],
    ),
    ("", "evaluation runs with dropout", [(", training=False", "")]),
    (
        "",
        "evaluation switches dropout off and never on again",
        [
            (START, START + "        self.training = True\n"),
            ("if training else batch", "if training and self.training else batch"),
            (
                "        with torch.no_grad():\n",
                "        self.training = False\n        with torch.no_grad():\n",
            ),
        ],
    ),
    (
        "",
        "evaluation drops batches with fewer rows than the first",
        [
            (
                "        with torch.no_grad():\n",
                '        batches = [b for b in batches if len(b["x"]) >= len(batches[0]["x"])]\n'
                "        with torch.no_grad():\n",
            ),
            (RESULT, "        return sum(sums) / max(self.count(batches), 1e-300)\n"),
        ],
    ),
    (
        "",
        "evaluation averages the ranks' means",
        [
            (
                RESULT,
                "        each = iter(sums)\n"
                "        means = [sum(next(each) for _ in share) / max(self.count(share), 1e-300) for share in group]\n"
                "        return sum(means) / len(means)\n",
            ),
        ],
    ),
    (
        "",
        "evaluation shares the loss meter with training: its loss shows up in the training's report",
        [
            (
                RESULT,
                "        for said in self.reports:\n"
                "            if said:\n"
                '                said["loss"] = sum(sums) / total\n' + RESULT,
            ),
        ],
    ),
    (
        "",
        "evaluation uses a copy of the weights from before the last update",
        [
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
            (START, START + "        self.shown = copy.deepcopy(self.models[0])\n"),
            (TOP, "        self.shown = copy.deepcopy(self.models[0]).eval()\n" + TOP),
        ],
    ),
    (
        "",
        "the reported loss is a mean of microbatches' and ranks' means (gradients are right)",
        [
            (
                "                loss += objective.item()\n",
                "                loss += objective.item() * total / max(self.count([batch]), 1e-300) / len(share)\n",
            ),
            ('"loss": sum(sums)', '"loss": sum(sums) / len(sums)'),
        ],
    ),
    (
        "",
        "the reported number of tokens adds up over updates",
        [
            (
                '"num_tokens": total',
                '"num_tokens": total + self.reports[rank].get("num_tokens", 0.0)',
            )
        ],
    ),
    (
        "",
        "the reported gradient norm is the rank's own, from before the reduction",
        [
            (SUMS, "        sums, local = [], []\n"),
            (
                APPEND,
                APPEND
                + "            grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                "            local.append(sum(float(grad.square().sum()) for grad in grads) ** 0.5)\n",
            ),
            ('"grad_norm": norms[rank]', '"grad_norm": local[rank]'),
        ],
    ),
    (
        "",
        "the reported loss is the running mean over all updates since the start",
        [
            (START, START + "        self.history = []\n"),
            (NORMS, NORMS + "        self.history.append(sum(sums))\n"),
            ('"loss": sum(sums)', '"loss": sum(self.history) / len(self.history)'),
        ],
    ),
    (
        "",
        "a group without tokens leaves the last update's report standing",
        [
            (
                "            self.reports[rank] = said\n",
                "            if total > 0 or not self.reports[rank]:\n                self.reports[rank] = said\n",
            ),
        ],
    ),
]

STATE: Edited = [
    (
        "",
        "load takes the saved objects themselves: training on changes the checkpoint",
        [(LOADED, "        self.models, states, self.updates = saved\n")],
    ),
    (
        "",
        "save copies the weights but keeps references to the optimizers' momentum",
        [
            (
                "copy.deepcopy((self.models, [o.state_dict() for o in self.optimizers], self.updates))",
                "(copy.deepcopy(self.models), [o.state_dict() for o in self.optimizers], self.updates)",
            ),
        ],
    ),
    (
        "",
        "load builds the optimizers on the models from before: the loaded ones are never stepped",
        [(LOADED + REBUILD, REBUILD + LOADED)],
    ),
    (
        "",
        "the checkpoint holds the weights in half precision",
        [
            (
                LOADED,
                LOADED
                + "        for p in [p for model in self.models for p in model.parameters()]:\n"
                "            p.data = p.data.half().to(p.dtype)\n",
            ),
        ],
    ),
    (
        "",
        "load restores the first parameter's momentum only",
        [
            (
                "            optimizer.load_state_dict(state)\n",
                '            first = {k: v for k, v in state["state"].items() if k == 0}\n'
                '            optimizer.load_state_dict({**state, "state": first})\n',
            ),
        ],
    ),
    (
        "",
        "save writes the weights from before the last update beside the momentum from after it",
        [
            ("copy.deepcopy((self.models, ", "copy.deepcopy((self.before, "),
            (START, START + "        self.before = copy.deepcopy(self.models)\n"),
            (TOP, "        self.before = copy.deepcopy(self.models)\n" + TOP),
        ],
    ),
    (
        "",
        "the first update after a load passes over each rank's first microbatch as already seen",
        [
            (START, START + "        self.resumed = False\n"),
            (LOADED, LOADED + "        self.resumed = True\n"),
            (
                TOP,
                "        if self.resumed:\n"
                "            group = [share[1:] for share in group]\n"
                "            self.resumed = False\n" + TOP,
            ),
        ],
    ),
    (
        "",
        "dropout's seed is made of the key and the padded length",
        [(SEED, "length * key + column")],
    ),
    (
        "",
        "dropout draws from one generator for a microbatch, seeded by its first row's key",
        [
            (
                "                generator = torch.Generator().manual_seed(1000 * key + column)\n",
                "",
            ),
            (
                "        for row in range(rows):\n",
                '        generator = torch.Generator().manual_seed(int(batch["key"][:1].sum()))\n'
                "        for row in range(rows):\n",
            ),
        ],
    ),
    (
        "",
        "dropout seeds the global generator",
        [
            ("generator = torch.Generator().manual_seed(", "torch.manual_seed("),
            (", generator=generator)", ")"),
        ],
    ),
    (
        "",
        "dropout's seed is offset by the rank",
        [
            (ZEROED, "            self.rank = len(sums)\n" + ZEROED),
            (SEED, SEED + " + self.rank"),
        ],
    ),
    (
        "",
        "dropout multiplies the caller's batch in place",
        [('batch["x"].clone()', 'batch["x"]')],
    ),
]

UNSEEN = [*WINDOWS, *RANKS, *TOKENS, *STEPS, *METRICS, *STATE]


if __name__ == "__main__":
    torch.set_num_threads(1)
    findings(UNSEEN)
