"""More mistakes in the loop by hand, written blind: without a look at what the kit draws."""

import torch

from benchmarks.kit import (
    APPEND,
    COUNTED,
    after_update,
    before_step,
    findings,
    guarded,
    of_weights,
)
from benchmarks.unseen import (
    FINITE,
    GIVEN,
    ITEM,
    LOADED,
    LOSS,
    NORM,
    OVER,
    PRODUCT,
    SAVED,
    TOKENS,
    ZEROED,
    at_start,
    regrouped,
)
from benchmarks.unseen_second import (
    DROPS,
    GROUPS,
    PARAMS,
    RESTORED,
    RESULT,
    SEED,
    after_step,
    before_evaluation,
)
from proofs.plain_mutants import (
    BACKWARD,
    EACH,
    REDUCED,
    TOTAL,
    WEIGHTS,
    ZERO,
    objective,
)

Edits = list[tuple[str, str]]

KEY = 'key = int(batch["key"][row])'
STATE = "(self.models, [o.state_dict() for o in self.optimizers], self.updates)"
MODELS = "[problem.module().eval() for _ in range(ranks)]"
SUMS = "        sums = []\n"
REDUCING = "        for params in zip("
RATE = "for g in optimizer.param_groups"


def given(expression: str) -> Edits:
    """What rank ``r``, whose own gradient is ``own``, gets of the reduction."""
    return [
        (
            GIVEN,
            f"            for r, (p, own) in enumerate(zip(params, grads)):\n                p.grad = ({expression}).clone()\n",
        )
    ]


def counted(*lines: str) -> Edits:
    """Lines after all tokens are counted."""
    return [(TOTAL, TOTAL + "".join(f"        {line}\n" for line in lines))]


def when_saving(*lines: str) -> Edits:
    """Lines after the state is copied."""
    return [
        (
            SAVED,
            SAVED.replace("return ", "saved = ")
            + "".join(f"        {line}\n" for line in lines)
            + "        return saved\n",
        )
    ]


def when_loaded(*lines: str) -> Edits:
    """Lines after all is loaded."""
    return [(LOADED, LOADED + "".join(f"        {line}\n" for line in lines))]


AT_MOST = [(RESULT, "        return sum(sums) / max(total, 1e-300)")]


UNSEEN: list[tuple[str, str, Edits]] = [
    # accumulation: windows, remainders, zeroing
    (
        "",
        "steps come at multiples of the first group's length in all microbatches so far",
        at_start("self.full, self.seen = 0, 0")
        + counted(
            "self.full = self.full or max(map(len, group))",
            "self.seen += max(map(len, group))",
        )
        + guarded("self.full and self.seen % self.full == 0"),
    ),
    (
        "",
        "microbatches are taken in pairs and an odd one is left out",
        regrouped("[share[: len(share) // 2 * 2 or len(share)] for share in group]"),
    ),
    (
        "",
        "neighbours of one shape are run as one microbatch, with the first one's keys",
        [
            (EACH, "            for batch in merged(share):\n"),
            (
                "def norm(",
                "def merged(share):\n    runs = []\n    for batch in share:\n        if runs and runs[-1][0]['x'].shape == batch['x'].shape:\n            runs[-1].append(batch)\n        else:\n            runs.append([batch])\n    return [{k: torch.cat([(run[0] if k == 'key' else b)[k] for b in run]) for k in run[0]} for run in runs]\n\n\ndef norm(",
            ),
        ],
    ),
    (
        "",
        "rows are padded to a multiple of four columns with their last one, weight and all",
        regrouped(
            "[[{k: x[:, [min(i, x.shape[1] - 1) for i in range(-(-x.shape[1] // 4) * 4)]] if x.ndim > 1 else x for k, x in b.items()} for b in share] for share in group]"
        ),
    ),
    (
        "",
        "rows of more than seven counted tokens are filtered as too long",
        of_weights("weights * ((weights > 0).sum(1, keepdim=True) <= 7)"),
    ),
    (
        "",
        "losses are taken in chunks of eight tokens that overlap in one",
        [
            (
                WEIGHTS,
                WEIGHTS
                + "\n        place = torch.arange(weights.numel()).view_as(weights)\n        weights = weights * (1 + ((place > 0) & (place % 8 == 0)).double())",
            )
        ],
    ),
    (
        "",
        "the sum so far is passed backward at each microbatch, its graph retained",
        [
            (ZEROED, ZEROED + "            so_far = 0.0\n"),
            (
                BACKWARD,
                "                so_far = so_far + objective\n                so_far.backward(retain_graph=True)\n",
            ),
        ],
    ),
    (
        "",
        "two buffers of gradients take turns, and the second is not zeroed",
        [
            *at_start("self.second = {}"),
            (
                ZEROED,
                ZEROED
                + "            for p in model.parameters() if self.updates % 2 else []:\n                p.grad = self.second.pop(p, None)\n",
            ),
            (
                APPEND,
                APPEND
                + "            for p in model.parameters() if self.updates % 2 else []:\n                self.second[p] = None if p.grad is None else p.grad.clone()\n",
            ),
        ],
    ),
    (
        "",
        "a group of a single microbatch takes the plain mean of its counted losses",
        regrouped(
            "[[{**b, 'w': (b['w'] > 0).to(b['w'].dtype)} for b in share] for share in group] if sum(map(len, group)) == 1 else group"
        ),
    ),
    (
        "",
        "rows whose keys came in an update before are left out",
        at_start("self.met = set()")
        + regrouped(
            "[[{k: x[[i for i, key in enumerate(b['key'].tolist()) if key not in self.met]] for k, x in b.items()} for b in share] for share in group]"
        )
        + after_update(
            "self.met.update(key for share in group for b in share for key in b['key'].tolist())"
        ),
    ),
    # counts and losses
    (
        "",
        "the first microbatch is divided by the rank's count, before the reduction is done",
        objective("(total if batch is not share[0] else self.count(share))"),
    ),
    (
        "",
        "several ranks' counts are reduced in float32",
        [
            (
                TOTAL,
                "        total = float(torch.tensor(counts).sum()) if len(counts) > 1 else sum(counts)\n",
            )
        ],
    ),
    (
        "",
        "a token's loss is ten at most",
        [(PRODUCT, "weights * losses.clamp(max=10.0), 0")],
    ),
    (
        "",
        "counts stand in a table by place, which is never cleared",
        [
            *at_start("self.table = {}"),
            (
                TOTAL,
                "        self.table.update({(r, at): self.count([b]) for r, share in enumerate(group) for at, b in enumerate(share)})\n        total = sum(self.table.values())\n",
            ),
        ],
    ),
    (
        "",
        "counts are kept by the batch's address",
        [
            *at_start("self.known = {}"),
            (COUNTED, f"self.known.setdefault(id(batch), {COUNTED})"),
        ],
    ),
    (
        "",
        "a microbatch with less than a fifth of padding is taken for full",
        [
            (
                COUNTED,
                f"(lambda w: w.numel() if w.double().mean() > 0.8 else w.sum())({COUNTED[:-6]})",
            )
        ],
    ),
    # ranks
    (
        "",
        "the mean over nodes of two ranks is of the nodes' means",
        [
            (
                REDUCED,
                "whole = sum(torch.stack(grads[at : at + 2]).mean(0) for at in range(0, len(grads), 2)) * (len(grads) / -(-len(grads) // 2))",
            )
        ],
    ),
    (
        "",
        "nothing is reduced where the first rank has no microbatches",
        given("whole if group[0] else own"),
    ),
    (
        "",
        "a rank all of whose tokens are ignored keeps its own gradient",
        given("own if group[r] and not counts[r] else whole"),
    ),
    (
        "",
        "the last of three ranks takes the sum before the first one's part has come",
        given("whole - grads[0] if len(grads) > 2 and r == len(grads) - 1 else whole"),
    ),
    (
        "",
        "a rank whose gradient is not finite is left out of the sum",
        [
            (
                REDUCED,
                f"grads = [g if len(grads) == 1 or bool(g.isfinite().all()) else torch.zeros_like(g) for g in grads]\n            {REDUCED}",
            )
        ],
    ),
    (
        "",
        "all ranks have one and the same model",
        [(MODELS, "[problem.module().eval()] * ranks")],
    ),
    (
        "",
        "the update after a skip is not reduced",
        at_start("self.reduces = True")
        + given("whole if self.reduces else own")
        + after_update("self.reduces = all(finite)"),
    ),
    (
        "",
        "the learning rate follows the square root of the ranks",
        at_start(f"[g.update(lr=problem.learning_rate * ranks**0.5) {GROUPS}]"),
    ),
    (
        "",
        "ranks of a larger run before are still counted",
        [
            *at_start("self.held = getattr(self, 'held', {})"),
            (
                TOTAL,
                "        self.held.update(enumerate(counts))\n        total = sum(self.held.values())\n",
            ),
        ],
    ),
    (
        "",
        "as many ranks are reduced as the trainer's first run had",
        [
            *at_start("self.world = getattr(self, 'world', ranks)"),
            (REDUCED, "whole = torch.stack(grads[: self.world]).sum(0)"),
        ],
    ),
    # clipping
    (
        "",
        "clipping to one enlarges what is shorter",
        before_step(f"[p.grad.mul_(1 / (norms[rank] + 1e-6)) for p in {PARAMS}]"),
    ),
    (
        "",
        "a leaf's gradient is at most twenty times as long as the leaf",
        before_step(
            f"[p.grad.mul_(min(1.0, 20 * max(float(p.detach().norm()), 1e-3) / max(float(p.grad.norm()), 1e-300))) for p in {PARAMS}]"
        ),
    ),
    (
        "",
        "the norm's squares overflow in float16, which is skipped",
        [
            (
                FINITE,
                "finite = [bool(torch.tensor(n * n).half().isfinite()) for n in norms]",
            )
        ],
    ),
    # learning rate, optimizer
    (
        "",
        "the learning rate follows the tokens over those of the first update",
        at_start("self.first = 0.0")
        + counted("self.first = self.first or total")
        + before_step(
            f"[g.update(lr=self.problem.learning_rate * total / self.first) {RATE}]"
        ),
    ),
    (
        "",
        "the learning rate warms up again after a load",
        at_start("self.warm = 1.0")
        + before_step(f"[g.update(lr=self.problem.learning_rate * self.warm) {RATE}]")
        + when_loaded("self.warm = 0.5")
        + after_update("self.warm = 1.0"),
    ),
    (
        "",
        "no step after the first 150 tokens",
        at_start("self.spent = 0.0")
        + guarded("self.spent <= 150")
        + after_update("self.spent += total"),
    ),
    (
        "",
        "momentum is dampened",
        at_start(f"[g.update(dampening=problem.momentum) {GROUPS}]"),
    ),
    (
        "",
        "parameters are rounded to float32 after the step",
        after_step(f"[p.data.copy_(p.data.float()) for p in {PARAMS}]"),
    ),
    # what is not finite
    (
        "",
        "what is not finite takes the last update back",
        [
            *at_start("self.good = None"),
            (
                FINITE,
                FINITE
                + "\n        for model, good in zip(self.models, self.good or []):\n            all(finite) or model.load_state_dict(good)\n        self.good = [copy.deepcopy(model.state_dict()) for model in self.models]",
            ),
        ],
    ),
    (
        "",
        "what is not finite does not overwrite the gradients of the last update, which are stepped",
        [
            *at_start("self.buffer = None"),
            (
                FINITE,
                FINITE
                + "\n        if all(finite):\n            self.buffer = [[p.grad.clone() for p in m.parameters()] for m in self.models]\n        elif self.buffer:\n            finite = [True] * len(finite)\n            for m, grads in zip(self.models, self.buffer):\n                for p, g in zip(m.parameters(), grads):\n                    p.grad = g.clone()",
            ),
        ],
    ),
    (
        "",
        "the loss scale grows at the third finite update in a row before that is unscaled",
        [
            *at_start("self.scale, self.row = 8.0, 0"),
            (BACKWARD, "                (objective * self.scale).backward()\n"),
            (
                REDUCING,
                "        self.row += 1\n        scale = self.scale * (1 if self.row % 3 else 2)\n"
                + REDUCING,
            ),
            (REDUCED, "whole = torch.stack(grads).sum(0) / scale"),
            *after_update(
                "self.scale, self.row = scale, self.row if all(finite) else 0"
            ),
        ],
    ),
    (
        "",
        "a skipped update reports no tokens",
        [(TOKENS, '"num_tokens": total if finite[rank] else 0.0')],
    ),
    # evaluation
    (
        "",
        "evaluation takes all counted tokens alike, whatever they weigh",
        before_evaluation(
            "group = [[{**b, 'w': (b['w'] > 0).to(b['w'].dtype)} for b in s] for s in group]"
        ),
    ),
    (
        "",
        "evaluation is of each rank's first four batches",
        before_evaluation("group = [share[:4] for share in group]") + AT_MOST,
    ),
    (
        "",
        "evaluation is the mean of the ranks' means",
        [
            (
                RESULT,
                "        with torch.no_grad():\n            means = [sum(float(self.weighted_sum(self.models[0], b, training=False)) for b in s) / self.count(s) for s in group if self.count(s)]\n        return sum(means) / len(means)",
            )
        ],
    ),
    (
        "",
        "evaluation before the first update is a check of two batches",
        before_evaluation(
            "group = [share[: None if self.updates else 2] for share in group]"
        )
        + AT_MOST,
    ),
    (
        "",
        "evaluation is of the model that a load has replaced",
        [
            *at_start("self.shown = self.models[0]"),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    (
        "",
        "the update after an evaluation is divided by the evaluation's tokens",
        [
            *at_start("self.items = None"),
            (OVER, OVER + "        self.items = total\n"),
            *objective("(self.items or total)"),
            *after_update("self.items = None"),
        ],
    ),
    (
        "",
        "evaluation rounds its inputs to bfloat16",
        before_evaluation(
            "group = [[{**b, 'x': b['x'].bfloat16().to(b['x'].dtype)} for b in s] for s in group]"
        ),
    ),
    (
        "",
        "evaluation divides by all tokens, ignored ones too",
        [
            (
                OVER,
                "        total = sum(self.problem.weights(b).numel() for share in group for b in share)\n",
            )
        ],
    ),
    (
        "",
        "evaluation is of the batches that it was first given",
        at_start("self.held = None")
        + before_evaluation("self.held = self.held or group", "group = self.held"),
    ),
    (
        "",
        "evaluation freezes the model and thaws what has dimensions",
        before_evaluation(
            "[p.requires_grad_(p.ndim > 0) for p in self.models[0].parameters()]"
        ),
    ),
    (
        "",
        "evaluation scales weights above one down in the caller's batches",
        before_evaluation(
            "for b in [b for share in group for b in share if b['w'].numel()]:",
            "    b['w'].copy_(b['w'] / b['w'].max().clamp(min=1))",
        ),
    ),
    # randomness
    (
        "",
        "the update after a load drops no elements",
        [
            *at_start("self.resumed = False"),
            (DROPS, "if not self.problem.model.dropout or self.resumed:"),
            *when_loaded("self.resumed = True"),
            *after_update("self.resumed = False"),
        ],
    ),
    (
        "",
        "noise follows the number of the rank's microbatches",
        [
            (EACH, "            self.number = len(share)\n" + EACH),
            (SEED, "manual_seed(1000 * key + column + 7919 * self.number)"),
        ],
    ),
    (
        "",
        "noise is kept by the microbatch's shape",
        [
            *at_start("self.masks = {}"),
            ('x = batch["x"].clone()', 'x = torch.ones_like(batch["x"])'),
            (
                'return {**batch, "x": x}',
                'return {**batch, "x": batch["x"] * self.masks.setdefault(x.shape, x)}',
            ),
        ],
    ),
    (
        "",
        "noise is kept by key in the length that came first, and a longer row's rest has none",
        [
            *at_start("self.lengths = {}"),
            (
                KEY,
                f"{KEY}\n                if column >= self.lengths.setdefault(key, length):\n                    continue",
            ),
        ],
    ),
    (
        "",
        "noise follows the columns that are left where those that all rows ignore are taken out",
        [
            (
                SEED,
                "manual_seed(1000 * key + int((batch['w'][:, :column] > 0).any(0).sum()))",
            )
        ],
    ),
    # saving, loading, starting
    (
        "",
        "the update after a load adds to the gradients that were saved",
        [
            *at_start("self.fresh = True"),
            (ZEROED, "            if self.fresh:\n                model.zero_grad()\n"),
            (
                STATE,
                "(self.models, [o.state_dict() for o in self.optimizers], self.updates, [[p.grad for p in m.parameters()] for m in self.models])",
            ),
            (
                RESTORED,
                "self.models, states, self.updates, grads = copy.deepcopy(saved)",
            ),
            *when_loaded(
                "self.fresh = False",
                "for model, own in zip(self.models, grads):",
                "    for p, g in zip(model.parameters(), own):",
                "        p.grad = g",
            ),
            *after_update("self.fresh = True"),
        ],
    ),
    (
        "",
        "a later checkpoint overwrites the one before",
        [
            (
                "    abilities = Abilities(",
                "    disk: dict[str, Any] = {}\n    abilities = Abilities(",
            ),
            (
                SAVED,
                SAVED.replace("return ", 'self.disk["last"] = ')
                + '        return "last"\n',
            ),
            (RESTORED, RESTORED.replace("saved", "self.disk[saved]")),
        ],
    ),
    (
        "",
        "the update after a load takes its first microbatch to be done",
        at_start("self.resumed = False")
        + regrouped(
            "[share[1:] or share for share in group] if self.resumed else group"
        )
        + when_loaded("self.resumed = True")
        + after_update("self.resumed = False"),
    ),
    (
        "",
        "saving halves the precision of the parameters in use",
        when_saving(
            "[p.data.copy_(p.data.half()) for m in self.models for p in m.parameters()]"
        ),
    ),
    (
        "",
        "after a save the optimizers move parameters that are no longer in use",
        when_saving("self.models = copy.deepcopy(self.models)"),
    ),
    (
        "",
        "a run that was loaded, saved and loaded again has its hooks twice",
        [
            *at_start("self.loads = 0"),
            (STATE, STATE.replace("self.updates)", "self.updates, self.loads)")),
            (
                RESTORED,
                "self.models, states, self.updates, loads = copy.deepcopy(saved)",
            ),
            *when_loaded("self.loads = loads + 1"),
            (REDUCED, "whole = torch.stack(grads).sum(0) * max(1, self.loads)"),
        ],
    ),
    (
        "",
        "a start with the problem of the run before goes on with that",
        [
            (
                "        self.problem = problem\n",
                "        if problem is getattr(self, 'problem', None) and len(self.models) == ranks:\n            return\n        self.problem = problem\n",
            )
        ],
    ),
    (
        "",
        "a second run drops elements where the first one did",
        [
            *at_start("self.dropout = getattr(self, 'dropout', problem.model.dropout)"),
            (DROPS, "if not self.dropout:"),
        ],
    ),
    # reports
    (
        "",
        "the mean loss of all updates so far is reported",
        [
            *at_start("self.losses = []"),
            (LOSS, '"loss": (sum(self.losses) + sum(sums)) / (len(self.losses) + 1),'),
            *after_update("self.losses.append(sum(sums))"),
        ],
    ),
    (
        "",
        "the list of the ranks' losses is a default argument",
        [
            (
                "def update(self, group: Sequence[Sequence[Batch]]) -> None:",
                "def update(self, group: Sequence[Sequence[Batch]], sums: list[float] = []) -> None:",
            ),
            (SUMS, ""),
        ],
    ),
    (
        "",
        "microbatches' losses stand in a table by place, which a shorter group does not clear",
        [
            *at_start("self.table = {}"),
            (EACH, "            for at, batch in enumerate(share):\n"),
            (ITEM, "                self.table[len(sums), at] = objective.item()\n"),
            (LOSS, '"loss": sum(self.table.values()),'),
        ],
    ),
    (
        "",
        "the sum of losses is not set back between ranks",
        [(ZERO, ZEROED), (SUMS, SUMS + "        loss = 0.0\n")],
    ),
    (
        "",
        "the loss is reported with the decay's penalty in it",
        [
            (
                LOSS,
                f'"loss": sum(sums) + 0.5 * self.problem.weight_decay * sum(float(p.detach().square().sum()) for p in {PARAMS}),',
            )
        ],
    ),
    (
        "",
        "the norm is reported of the ranks' gradients side by side",
        [
            (
                REDUCING,
                "        shards = sum(float(p.grad.square().sum()) for m in self.models for p in m.parameters() if p.grad is not None) ** 0.5\n"
                + REDUCING,
            ),
            (NORM, '"grad_norm": shards,'),
        ],
    ),
    (
        "",
        "the number of tokens is reduced to the first rank alone",
        [(TOKENS, '"num_tokens": counts[rank] if rank else total')],
    ),
    ("", "at least one token is reported", [(TOKENS, '"num_tokens": max(total, 1.0)')]),
    # what belongs to the caller, or to all
    (
        "",
        "the count is put into the caller's batches where there are several",
        [
            (
                EACH,
                EACH
                + "                len(share) > 1 and batch.update(num_items=torch.tensor(total))\n",
            )
        ],
    ),
    (
        "",
        "a start lowers the precision of float32 products",
        at_start('torch.set_float32_matmul_precision("high")'),
    ),
    (
        "",
        "saving takes a name from Python's generator",
        when_saving("__import__('random').random()"),
    ),
    ("", "loading seeds NumPy", when_loaded("__import__('numpy').random.seed(0)")),
    (
        "",
        "evaluation silences warnings",
        before_evaluation("__import__('warnings').simplefilter('ignore')"),
    ),
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    findings(UNSEEN)
