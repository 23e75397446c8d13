"""Mistakes in the loop by hand, written blind: without a look at what the kit draws."""

import torch

from benchmarks.kit import (
    COUNTED,
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
from benchmarks.unseen import (
    FINITE,
    GIVEN,
    ITEM,
    LOADED,
    LOSS,
    NORM,
    OVER,
    SAVED,
    TOKENS,
    ZEROED,
    at_start,
    regrouped,
)
from proofs.plain_mutants import BACKWARD, EACH, REDUCED, TOTAL, objective

SEED = "manual_seed(1000 * key + column)"
RESULT = "        return sum(sums) / total"
DROPS = "if not self.problem.model.dropout:"
RESTORED = "self.models, states, self.updates = copy.deepcopy(saved)"
REBUILT = "        self.optimizers = [self.problem.optimizer(model) for model in self.models]\n        for optimizer, state"
NUMBER = "int((self.problem.weights(b) > 0).sum())"
GROUPS = "for o in self.optimizers for g in o.param_groups"
PARAMS = "self.models[rank].parameters()"
BUFFERS = "for s in optimizer.state.values() if s.get('momentum_buffer') is not None"


def each_batch(expression: str) -> list[tuple[str, str]]:
    """Other rows in each microbatch, for its loss and its count."""
    return regrouped(
        f"[[{{k: {expression} for k, x in b.items()}} for b in share] for share in group]"
    )


def after_step(line: str) -> list[tuple[str, str]]:
    """A line after the optimizer has moved."""
    return [(STEP, f"{STEP}                {line}\n")]


def before_evaluation(*lines: str) -> list[tuple[str, str]]:
    """Lines before tokens are counted."""
    return [(OVER, "".join(f"        {line}\n" for line in lines) + OVER)]


UNSEEN: list[tuple[str, str, list[tuple[str, str]]]] = [
    # accumulation, rows, windows
    (
        "",
        "gradients of a skipped update stay for the next",
        [
            *at_start("self.stepped = True"),
            (
                ZEROED,
                "            if self.stepped:\n                model.zero_grad()\n",
            ),
            *after_update("self.stepped = all(finite)"),
        ],
    ),
    (
        "",
        "a microbatch is scaled by its rows over those of the first",
        scaled("len(batch['w']) / len(share[0]['w'])"),
    ),
    (
        "",
        "rows beyond a multiple of four are dropped",
        each_batch("x[: len(x) // 4 * 4 or len(x)]"),
    ),
    (
        "",
        "rows beyond a budget of sixteen tokens are left out",
        each_batch("x[: max(1, 16 // b['w'].shape[1])]"),
    ),
    (
        "",
        "an odd number of rows is filled up with the first again",
        each_batch("torch.cat([x, x[:1]]) if len(x) % 2 else x"),
    ),
    (
        "",
        "rows beyond the number in the run's first microbatch are left out",
        [
            *at_start("self.rows = 0"),
            (
                EACH,
                EACH
                + "                self.rows = self.rows or len(batch['w'])\n                batch = {k: x[: self.rows] for k, x in batch.items()}\n",
            ),
        ],
    ),
    (
        "",
        "the warm-up pass of a new shape leaves its gradient",
        [
            *at_start("self.shapes = set()"),
            (
                BACKWARD,
                "                if batch['w'].shape not in self.shapes:\n                    self.shapes.add(batch['w'].shape)\n                    objective.backward(retain_graph=True)\n"
                + BACKWARD,
            ),
        ],
    ),
    (
        "",
        "a row whose key came before in the update is left out",
        [
            (
                "        counts = [",
                "        met: set[int] = set()\n        group = [[fresh(batch, met) for batch in share] for share in group]\n        counts = [",
            ),
            (
                "def norm(",
                "def fresh(batch, met):\n    rows = [i for i, k in enumerate(batch['key'].tolist()) if not (k in met or met.add(k))]\n    return {k: x[rows] for k, x in batch.items()}\n\n\ndef norm(",
            ),
        ],
    ),
    # weights, counts, denominators
    (
        "",
        "each row's count is at least one",
        [(COUNTED, "self.problem.weights(batch).double().sum(1).clamp(min=1).sum()")],
    ),
    (
        "",
        "microbatches' means are weighed by tokens, not weights",
        objective(
            f"self.count([batch]) * sum({NUMBER} for s in group for b in s) / max(1, int((self.problem.weights(batch) > 0).sum()))"
        ),
    ),
    ("", "weights are rounded to bfloat16", of_weights("weights.bfloat16().double()")),
    (
        "",
        "ignored tokens between counted ones count",
        of_weights(
            "torch.where((weights == 0) & ((weights > 0).long().cumsum(1) > 0) & ((weights > 0).long().flip(1).cumsum(1).flip(1) > 0), 1, weights.double())"
        ),
    ),
    (
        "",
        "rows are cut at the largest number of counted tokens",
        of_batch(KEYS % "[:, : max([1, *(batch['w'] > 0).sum(1).tolist()])]"),
    ),
    (
        "",
        "counts are kept by the rows' keys, in all runs",
        [
            (
                COUNTED,
                f"self.known.setdefault(tuple(batch['key'].tolist()), {COUNTED})",
            ),
            (
                "    abilities = Abilities(",
                "    known: dict[Any, Any] = {}\n    abilities = Abilities(",
            ),
        ],
    ),
    (
        "",
        "microbatches of one shape are taken to have the first one's count",
        [
            (
                TOTAL,
                TOTAL
                + "        alike = [b for share in group for b in share]\n        if len({b['w'].shape for b in alike}) == 1:\n            total = self.count(alike[:1]) * len(alike)\n",
            )
        ],
    ),
    (
        "",
        "a microbatch that comes twice is counted once",
        [
            (
                TOTAL,
                "        total = sum({id(b): self.count([b]) for share in group for b in share}.values())\n",
            )
        ],
    ),
    ("", "no step where less than one whole token counts", guarded("int(total) > 0")),
    # ranks
    (
        "",
        "microbatches that not all ranks have are not counted",
        [
            (
                TOTAL,
                "        total = sum(self.count(batches) for batches in zip(*group))\n",
            )
        ],
    ),
    (
        "",
        "the count is reduced by maximum",
        [(TOTAL, "        total = max(counts)\n")],
    ),
    (
        "",
        "a rank without microbatches adds what was reduced before",
        [
            (
                ZEROED,
                "            if not share:\n                sums.append(0.0)\n                continue\n"
                + ZEROED,
            )
        ],
    ),
    (
        "",
        "a rank without microbatches counts what it did before",
        [
            *at_start("self.counts = [0.0] * ranks"),
            (
                TOTAL,
                "        counts = [c if share else old for c, share, old in zip(counts, group, self.counts)]\n        self.counts = counts\n"
                + TOTAL,
            ),
        ],
    ),
    (
        "",
        "ranks' means are weighed by their numbers of microbatches",
        objective("self.count(share) * sum(map(len, group)) / len(share)"),
    ),
    (
        "",
        "the rate is that of one rank times ranks, for a mean over ranks",
        [
            *at_start(f"[g.update(lr=problem.learning_rate * ranks) {GROUPS}]"),
            (REDUCED, "whole = torch.stack(grads).mean(0)"),
            ("norms = [norm(model) for", "norms = [norm(model) * len(group) for"),
        ],
    ),
    (
        "",
        "ranks are reduced in pairs",
        [
            (
                GIVEN,
                "            for at, p in enumerate(params):\n                p.grad = torch.stack(grads[at // 2 * 2 : at // 2 * 2 + 2]).sum(0)\n",
            )
        ],
    ),
    # clipping
    (
        "",
        "what has been added up is clipped between microbatches",
        [
            (
                BACKWARD,
                BACKWARD
                + "                if batch is not share[-1]:\n                    torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)\n",
            )
        ],
    ),
    (
        "",
        "several ranks clip their own gradients before the reduction",
        [
            (
                "        for params in zip(",
                "        if len(group) > 1:\n            [torch.nn.utils.clip_grad_norm_(m.parameters(), 2.0) for m in self.models]\n        for params in zip(",
            )
        ],
    ),
    (
        "",
        "a norm of more than twice that before is clipped",
        [
            *at_start('self.limit = float("inf")'),
            (
                FINITE,
                FINITE
                + "\n        if all(finite) and norms[0] > self.limit:\n            [torch.nn.utils.clip_grad_norm_(m.parameters(), self.limit) for m in self.models]\n        self.limit = 2 * norms[0] if all(finite) and norms[0] > 0 else self.limit",
            ),
        ],
    ),
    # the optimizer
    (
        "",
        "a momentum of zero is taken for none given",
        at_start(f"[g.update(momentum=problem.momentum or 0.9) {GROUPS}]"),
    ),
    (
        "",
        "momentum is Nesterov's",
        at_start(f"[g.update(nesterov=problem.momentum > 0) {GROUPS}]"),
    ),
    (
        "",
        "momentum is kept in bfloat16",
        after_step(
            f"[s['momentum_buffer'].copy_(s['momentum_buffer'].bfloat16()) {BUFFERS}]"
        ),
    ),
    (
        "",
        "a leaf without dimensions has no momentum",
        before_step(f"[optimizer.state.pop(p, None) for p in {PARAMS} if p.ndim == 0]"),
    ),
    # what is not finite
    (
        "",
        "a skip halves the learning rate",
        after_update(f"[g.update(lr=g['lr'] * (1 if all(finite) else 0.5)) {GROUPS}]"),
    ),
    (
        "",
        "two skips in a row lose momentum",
        at_start("self.skipped = 0")
        + after_update(
            "self.skipped = 0 if all(finite) else self.skipped + 1",
            "self.skipped == 2 and [o.state.clear() for o in self.optimizers]",
        ),
    ),
    (
        "",
        "a skip looks at the loss of the ranks' last microbatches",
        [
            ("        sums = []\n", "        sums, last = [], {}\n"),
            (ITEM, ITEM + "                last[model] = bool(objective.isfinite())\n"),
            (FINITE, "finite = [all(last.values())] * len(norms)"),
        ],
    ),
    # evaluation
    (
        "",
        "evaluation fills shorter ranks up with their batches again",
        before_evaluation(
            "most = max(map(len, group))",
            "group = [[s[i % len(s)] for i in range(most)] if s else [] for s in group]",
        ),
    ),
    (
        "",
        "evaluation is of the first rank's batches alone",
        before_evaluation(
            "group = [share for share in group if self.count(share)][:1]"
        ),
    ),
    (
        "",
        "evaluation weighs batches' means by their rows",
        [
            (
                RESULT,
                "        means = [s / max(self.count([b]), 1e-300) * len(b['w']) for s, b in zip(sums, batches)]\n        return sum(means) / sum(len(b['w']) for b in batches)",
            )
        ],
    ),
    (
        "",
        "evaluation is of a moving average of the weights",
        [
            *at_start("self.averaged = copy.deepcopy(self.models[0])"),
            *after_update(
                "for a, p in zip(self.averaged.parameters(), self.models[0].parameters()):",
                "    a.data.lerp_(p.data, 0.5)",
            ),
            (
                "self.weighted_sum(self.models[0], b",
                "self.weighted_sum(self.averaged, b",
            ),
        ],
    ),
    (
        "",
        "evaluation of a batch without tokens is nothing divided by nothing",
        [
            (
                "float(self.weighted_sum(self.models[0], b, training=False))",
                "float(self.weighted_sum(self.models[0], b, training=False) / self.count([b])) * self.count([b])",
            )
        ],
    ),
    (
        "",
        "evaluation cuts rows at the longest that were trained on",
        [
            *at_start("self.longest = 0"),
            (
                TOTAL,
                TOTAL
                + "        self.longest = max([self.longest, *(b['w'].shape[1] for s in group for b in s)])\n",
            ),
            *before_evaluation(
                "cut = self.longest or None",
                "group = [[{k: x[:, :cut] if x.ndim > 1 else x for k, x in b.items()} for b in s] for s in group]",
            ),
            (RESULT, "        return sum(sums) / max(total, 1e-300)"),
        ],
    ),
    (
        "",
        "an evaluation is kept until the next update",
        [
            *at_start("self.evaluated = None"),
            *before_evaluation(
                "if self.evaluated and self.evaluated[0] == self.updates:",
                "    return self.evaluated[1]",
            ),
            (
                RESULT,
                "        self.evaluated = (self.updates, sum(sums) / total)\n        return self.evaluated[1]",
            ),
        ],
    ),
    (
        "",
        "an evaluation that is no better halves the learning rate",
        [
            *at_start('self.best = float("inf")'),
            (
                RESULT,
                f"        if sum(sums) / total >= self.best:\n            [g.update(lr=g['lr'] / 2) {GROUPS}]\n        self.best = min(self.best, sum(sums) / total)\n{RESULT}",
            ),
        ],
    ),
    # randomness
    (
        "",
        "after an evaluation elements are dropped no more",
        [
            *at_start("self.evaluating = False"),
            (DROPS, "if not self.problem.model.dropout or self.evaluating:"),
            *before_evaluation("self.evaluating = True"),
        ],
    ),
    (
        "",
        "noise follows the rank",
        [
            (
                "for model, share in zip(self.models, group, strict=True):",
                "for self.rank, (model, share) in enumerate(zip(self.models, group, strict=True)):",
            ),
            (SEED, "manual_seed(1000 * key + column + 7919 * self.rank)"),
        ],
    ),
    (
        "",
        "noise follows the number of evaluations before",
        [
            *at_start("self.evaluations = 0"),
            *before_evaluation("self.evaluations += 1"),
            (SEED, "manual_seed(1000 * key + column + 7919 * self.evaluations)"),
        ],
    ),
    (
        "",
        "a second run has other noise",
        [
            *at_start("self.runs = getattr(self, 'runs', -1) + 1"),
            (SEED, "manual_seed(1000 * key + column + 7919 * self.runs)"),
        ],
    ),
    (
        "",
        "a token all of whose elements are dropped is taken for padding",
        [
            (
                "        losses = self.problem.losses(model, self.dropped(batch) if training else batch)\n",
                "        batch = self.dropped(batch) if training else batch\n        weights = weights * (batch['x'] != 0).any(-1)\n        losses = self.problem.losses(model, batch)\n",
            )
        ],
    ),
    # saving and loading
    (
        "",
        "after a load all ranks have the first one's momentum in common",
        [("optimizer.load_state_dict(state)", "optimizer.load_state_dict(states[0])")],
    ),
    (
        "",
        "a saved momentum goes on with the run",
        [
            (
                SAVED,
                "        return copy.deepcopy(self.models), [o.state_dict() for o in self.optimizers], self.updates\n",
            )
        ],
    ),
    (
        "",
        "what was saved can be loaded once",
        [(RESTORED, "self.models, states, self.updates = saved")],
    ),
    (
        "",
        "after a load nothing decays",
        [
            (
                LOADED,
                LOADED
                + "            [g.update(weight_decay=0.0) for g in optimizer.param_groups]\n",
            )
        ],
    ),
    (
        "",
        "weights are saved in float32",
        [
            (
                SAVED,
                "        models = [copy.deepcopy(model).float() for model in self.models]\n"
                + SAVED.replace("(self.models,", "(models,"),
            ),
            (
                REBUILT,
                "        kind = next(self.problem.module().parameters()).dtype\n        self.models = [model.to(kind) for model in self.models]\n"
                + REBUILT,
            ),
        ],
    ),
    (
        "",
        "a leaf without dimensions is not saved",
        [
            (
                REBUILT,
                "        for model in self.models:\n            for p, new in zip(model.parameters(), self.problem.module().parameters()):\n                p.data = p.data if p.ndim else new.data\n"
                + REBUILT,
            )
        ],
    ),
    (
        "",
        "momentum stays where what is loaded has none",
        [
            (RESTORED, RESTORED.replace("self.models", "models")),
            (
                REBUILT,
                "        for model, other in zip(self.models, models):\n            model.load_state_dict(other.state_dict())\n        for optimizer, state",
            ),
            (
                LOADED,
                "            if state['state']:\n                optimizer.load_state_dict(state)\n",
            ),
        ],
    ),
    (
        "",
        "what was saved at this number of updates is not saved again",
        [
            (
                SAVED,
                SAVED.replace(
                    "return ", "self.kept = getattr(self, 'kept', {})\n        saved = "
                )
                + "        return self.kept.setdefault(self.updates, saved)\n",
            )
        ],
    ),
    # reports
    (
        "",
        "the norm is reported with the decay in it",
        [
            (
                FINITE,
                FINITE
                + "\n        shown = [float(sum((p.grad + self.problem.weight_decay * p.data).square().sum() for p in m.parameters()).sqrt()) for m in self.models]",
            ),
            (NORM, '"grad_norm": shown[rank],'),
        ],
    ),
    (
        "",
        "the leaves' norms are added up",
        [(NORM, f'"grad_norm": sum(float(p.grad.norm()) for p in {PARAMS}),')],
    ),
    (
        "",
        "the loss is reported for each token, not for each weight",
        [
            (
                LOSS,
                f'"loss": sum(sums) * total / max(1, sum({NUMBER} for s in group for b in s)),',
            )
        ],
    ),
    (
        "",
        "tokens are reported since the last step that was made",
        [
            *at_start("self.tokens = 0.0"),
            (TOTAL, TOTAL + "        self.tokens += total\n"),
            (TOKENS, '"num_tokens": self.tokens'),
            *after_update("self.tokens = 0.0 if all(finite) else self.tokens"),
        ],
    ),
    (
        "",
        "the tokens of an evaluation are reported with the next update's",
        [
            *at_start("self.tokens = 0.0"),
            (OVER, OVER + "        self.tokens += total\n"),
            (TOKENS, '"num_tokens": total + self.tokens'),
            *after_update("self.tokens = 0.0"),
        ],
    ),
    (
        "",
        "the loss is reported after the step",
        [
            (
                LOSS,
                '"loss": sum(float(self.weighted_sum(self.models[rank], b).detach()) for s in group for b in s) / max(total, 1e-300),',
            )
        ],
    ),
    (
        "",
        "an update without tokens reports the norm before",
        [
            *at_start("self.norm = 0.0"),
            (NORM, '"grad_norm": norms[rank] if total else self.norm,'),
            *after_update("self.norm = norms[0] if total else self.norm"),
        ],
    ),
    (
        "",
        "the loss is added up in float32",
        [
            ("            loss = 0.0\n", "            loss = torch.zeros(())\n"),
            (ITEM, "                loss += objective.detach()\n"),
            (
                "            sums.append(loss)\n",
                "            sums.append(float(loss))\n",
            ),
        ],
    ),
    # what belongs to the caller, or to all
    (
        "",
        "a second run keeps the first one's learning rate",
        at_start("self.rate = getattr(self, 'rate', problem.learning_rate)")
        + before_step("[g.update(lr=self.rate) for g in optimizer.param_groups]"),
    ),
    (
        "",
        "the first rank trains the caller's own model",
        [
            (
                "[problem.module().eval() for _ in range(ranks)]",
                "[problem.module().eval() if r else problem.model.eval() for r in range(ranks)]",
            )
        ],
    ),
    (
        "",
        "targets of ignored tokens are filled in the caller's batch",
        [
            (
                EACH,
                EACH
                + "                batch['y'].masked_fill_(self.problem.weights(batch) == 0, 0)\n",
            )
        ],
    ),
    (
        "",
        "shorter ranks are filled up in the caller's lists",
        [
            (
                "        counts = [",
                "        for share in group:\n            while isinstance(share, list) and len(share) < max(map(len, group)):\n                like = max(group, key=len)[0]\n                share.append({**like, 'w': torch.zeros_like(like['w'])})\n        counts = [",
            )
        ],
    ),
    (
        "",
        "evaluation cuts columns of padding off the caller's batches",
        before_evaluation(
            "for b in [b for share in group for b in share]:",
            "    ends = max([1, *(i + 1 for i, any in enumerate((b['w'] > 0).any(0).tolist()) if any)])",
            "    b.update({k: x[:, :ends] for k, x in b.items() if x.ndim > 1})",
        ),
    ),
    (
        "",
        "the collector of garbage is off after an update",
        after_update("__import__('gc').disable()"),
    ),
    ("", "evaluation seeds torch", before_evaluation("torch.manual_seed(0)")),
    (
        "",
        "a skip turns the search for anomalies on",
        after_update("all(finite) or torch.autograd.set_detect_anomaly(True)"),
    ),
    (
        "",
        "three microbatches or more are shuffled by Python's generator",
        [
            (
                EACH,
                "            for batch in __import__('random').sample(share, len(share)) if len(share) > 2 else share:\n",
            )
        ],
    ),
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    findings(UNSEEN)
