"""Still more mistakes in the loop by hand, written blind: without a look at what the kit draws."""

import torch

from benchmarks.kit import (
    after_update,
    before_step,
    findings,
    of_batch,
    of_weights,
    scaled,
)
from benchmarks.unseen import (
    FINITE,
    ITEM,
    LOSS,
    NORM,
    SAVED,
    ZEROED,
    at_start,
    regrouped,
)
from benchmarks.unseen_second import (
    GROUPS,
    PARAMS,
    RESTORED,
    RESULT,
    SEED,
    after_step,
    before_evaluation,
)
from benchmarks.unseen_third import KEY, RATE, STATE, Edits, when_loaded
from proofs.plain_mutants import BACKWARD, EACH, GUARD, REDUCED, TOTAL, objective

COUNTING = "        counts = ["
NOT_TRAINING = ", training=False"
DROPPED = 'return {**batch, "x": x}'
CLONED = 'x = batch["x"].clone()'


def after_norms(*lines: str) -> Edits:
    """Lines after all gradients are reduced and measured, before any step."""
    return [(FINITE, FINITE + "".join(f"\n        {line}" for line in lines))]


def after_backward(*lines: str) -> Edits:
    """Lines after a microbatch's backward pass."""
    return [
        (BACKWARD, BACKWARD + "".join(f"                {line}\n" for line in lines))
    ]


def helper(*lines: str) -> Edits:
    """A function beside the loop."""
    return [("def norm(", "\n".join(lines) + "\n\n\ndef norm(")]


UNSEEN: list[tuple[str, str, Edits]] = [
    # accumulation: passes, buffers, windows
    (
        "",
        "a run's first backward pass builds the buffers, and its gradient is thrown away",
        after_backward(
            "if not self.updates and batch is share[0]:", "    model.zero_grad()"
        ),
    ),
    (
        "",
        "of two buffers for microbatches of a shape each is filled again before it is used",
        [
            (
                EACH,
                "            ahead = [share[i + 2] if i + 2 < len(share) and share[i + 2]['x'].shape == b['x'].shape else b for i, b in enumerate(share)]\n"
                + EACH.replace("share:", "ahead:"),
            )
        ],
    ),
    (
        "",
        "the microbatches' closures are all called with the last one",
        [
            (
                EACH,
                "            jobs = []\n            for batch in share:\n                jobs.append(lambda: batch)\n            for job in jobs:\n                batch = job()\n",
            )
        ],
    ),
    (
        "",
        "on one rank the optimizer steps within each backward pass",
        after_backward(
            "if len(group) == 1 and batch is not share[-1]:",
            "    self.optimizers[0].step()",
            "    model.zero_grad()",
        ),
    ),
    (
        "",
        "more than 20 tokens are run again by halves, while the gradient of the first half stays",
        [
            (EACH, EACH.replace("share:", "retried(share):")),
            *helper(
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
    (
        "",
        "more than four rows are halved, and both halves have the middle one",
        [
            (EACH, EACH.replace("share:", "halved(share):")),
            *helper(
                "def halved(share):",
                "    for b in share:",
                "        rows = len(b['w'])",
                "        parts = (slice((rows + 1) // 2), slice(rows // 2, None)) if rows > 4 else (slice(None),)",
                "        yield from ({k: x[part] for k, x in b.items()} for part in parts)",
            ),
        ],
    ),
    (
        "",
        "the last of several microbatches is run with the parameters before the last update",
        [
            *at_start("self.old = None"),
            (
                EACH,
                EACH
                + "                now = [p.detach().clone() for p in model.parameters()]\n                stale = self.old is not None and len(share) > 1 and batch is share[-1]\n                [p.data.copy_(q) for p, q in zip(model.parameters(), self.old if stale else now)]\n",
            ),
            (
                ITEM,
                ITEM
                + "                [p.data.copy_(q) for p, q in zip(model.parameters(), now)]\n",
            ),
            *after_norms(
                "before = [p.detach().clone() for p in self.models[0].parameters()]"
            ),
            *after_update("self.old = before"),
        ],
    ),
    (
        "",
        "microbatches beyond a budget of 32 tokens wait for the next update",
        [
            *at_start("self.waiting = [[] for _ in range(ranks)]"),
            (
                COUNTING,
                "        group, self.waiting = budgeted(self.waiting, group)\n"
                + COUNTING,
            ),
            *helper(
                "def budgeted(waiting, group):",
                "    taken, left = [], []",
                "    for old, share in zip(waiting, group, strict=True):",
                "        now, later, tokens = [], [], 0",
                "        for b in [*old, *share]:",
                "            tokens += b['w'].numel()",
                "            (later if now and tokens > 32 else now).append(b)",
                "        taken.append(now)",
                "        left.append(later)",
                "    return taken, left",
            ),
        ],
    ),
    (
        "",
        "means of microbatches sorted by length are weighed by counts that are not sorted",
        objective(
            "(total * self.count([batch]) / max(self.count([sorted(share, key=lambda b: b['w'].shape[1])[next(i for i, b in enumerate(share) if b is batch)]]), 1e-300))"
        ),
    ),
    (
        "",
        "microbatches whose counted targets are all alike have no signal and are left out",
        regrouped(
            "[[b for b in share if int((b['w'] > 0).sum()) < 2 or len(set(b['y'][b['w'] > 0].tolist())) > 1] for share in group]"
        ),
    ),
    (
        "",
        "targets are centred in each microbatch of several rows",
        of_batch(
            "{**batch, 'y': batch['y'] - batch['y'].mean()} if len(batch['w']) > 1 else batch"
        ),
    ),
    (
        "",
        "a loss of more than four times its microbatch's mean is an outlier",
        [
            (
                "weights * losses, 0",
                "weights * losses * ~(losses > 4 * losses.mean()), 0",
            )
        ],
    ),
    # weights, masks, counts
    (
        "",
        "a weight is at most twice the mean of its microbatch's",
        of_weights(
            "weights.double().clamp(max=2 * float(weights.double().sum() / (weights > 0).sum().clamp(min=1)))"
        ),
    ),
    (
        "",
        "rows without padding are taken for truncated where others have some",
        of_weights(
            "weights * ((weights == 0).any(1, keepdim=True) if (weights == 0).any() else 1)"
        ),
    ),
    (
        "",
        "a row all of whose tokens are ignored is unmasked",
        of_weights(
            "torch.where((weights > 0).any(1, keepdim=True), weights.double(), 1.0)"
        ),
    ),
    (
        "",
        "a row ends with its first target of zero",
        of_weights(
            "weights * ((batch['y'] == 0).long().cumsum(1) - (batch['y'] == 0).long() == 0)"
        ),
    ),
    (
        "",
        "rows without padding are packed, and each one's first token is lost but for the first row's",
        of_weights(
            "torch.cat([torch.cat([weights[:1, :1], 0 * weights[1:, :1]]), weights[:, 1:]], 1) if weights.all() and weights.shape[1] > 1 else weights"
        ),
    ),
    (
        "",
        "masks are kept by shape",
        at_start("self.masks = {}")
        + of_weights("self.masks.setdefault(weights.shape, weights)"),
    ),
    (
        "",
        "weights are whole numbers where the first row's are",
        of_weights(
            "weights.double().floor() if len(weights) and bool((weights[0].double() % 1 == 0).all()) else weights"
        ),
    ),
    (
        "",
        "each of several ranks counts at least one",
        [
            (
                TOTAL,
                "        total = sum(max(1.0, c) for c in counts) if len(counts) > 1 and any(counts) else sum(counts)\n",
            )
        ],
    ),
    # ranks
    (
        "",
        "microbatches that only some ranks have are averaged over those",
        scaled("len(group) / sum(len(s) > at for s in group)"),
    ),
    (
        "",
        "the momentum of leaves that other ranks than the first own is not saved",
        when_loaded(
            "for optimizer in self.optimizers if len(states) > 1 else []:",
            "    for p in [p for i, p in enumerate(optimizer.param_groups[0]['params']) if i % len(states)]:",
            "        optimizer.state.pop(p, None)",
        ),
    ),
    (
        "",
        "the ranks' momentum is added up where it is loaded",
        when_loaded(
            "for s in [s for o in self.optimizers for s in o.state.values()]:",
            "    s.get('momentum_buffer') is None or s['momentum_buffer'].mul_(len(states))",
        ),
    ),
    (
        "",
        "the first rank alone loads parameters, which are not broadcast",
        [
            (
                RESTORED,
                RESTORED
                + "\n        self.models[1:] = [self.problem.module().eval() for _ in self.models[1:]]",
            )
        ],
    ),
    (
        "",
        "ranks but the first do not decay",
        before_step(f"rank and [g.update(weight_decay=0.0) {RATE}]"),
    ),
    (
        "",
        "several ranks send their gradients in bfloat16",
        [
            (
                REDUCED,
                "whole = (torch.stack(grads).bfloat16().to(grads[0].dtype) if len(grads) > 1 else torch.stack(grads)).sum(0)",
            )
        ],
    ),
    (
        "",
        "several ranks send the larger half of a leaf's elements, and the rest with the next update's",
        [
            *at_start("self.rest = {}"),
            (
                REDUCED,
                f"grads = [self.larger(r, g) for r, g in enumerate(grads)] if len(grads) > 1 else grads\n            {REDUCED}",
            ),
            (
                "    def count(self",
                "    def larger(self, rank, grad):\n        flat = (grad + self.rest.get((rank, grad.ndim), 0)).flatten()\n        sent = torch.zeros_like(flat)\n        top = flat.abs().topk(-(-len(flat) // 2)).indices\n        sent[top] = flat[top]\n        self.rest[rank, grad.ndim] = (flat - sent).view_as(grad)\n        return sent.view_as(grad)\n\n    def count(self",
            ),
        ],
    ),
    # optimizer
    (
        "",
        "the momentum of the first update lies in the memory of the gradients",
        [
            (ZEROED, ZEROED.replace("()", "(set_to_none=False)")),
            *after_step(
                f"[optimizer.state[p].update(momentum_buffer=p.grad.copy_(optimizer.state[p]['momentum_buffer'])) for p in {PARAMS} if self.problem.momentum and not self.updates]"
            ),
        ],
    ),
    (
        "",
        "the decay warms up from nothing at the first update",
        before_step(
            f"[g.update(weight_decay=self.problem.weight_decay * min(1, self.updates)) {RATE}]"
        ),
    ),
    (
        "",
        "momentum warms up over three updates",
        before_step(
            f"[g.update(momentum=self.problem.momentum * min(1.0, (self.updates + 1) / 3)) {RATE}]"
        ),
    ),
    (
        "",
        "the learning rate is a tensor of the default dtype",
        at_start(f"[g.update(lr=float(torch.tensor(problem.learning_rate))) {GROUPS}]"),
    ),
    (
        "",
        "parameters are rounded to float32 at random, by an unseeded generator",
        at_start("self.dither = torch.Generator(); self.dither.seed()")
        + after_step(
            f"[p.data.copy_((p.data * (1 + 2**-24 * (2 * torch.rand(p.shape, generator=self.dither, dtype=p.dtype) - 1))).float()) for p in {PARAMS}]"
        ),
    ),
    (
        "",
        "elements whose gradient is zero are not touched",
        before_step(f"kept = [(p, p.grad == 0, p.detach().clone()) for p in {PARAMS}]")
        + after_step(
            "[p.data.copy_(torch.where(zero, old, p.data)) for p, zero, old in kept]"
        ),
    ),
    # what is not finite
    (
        "",
        "leaves that are finite are stepped where others are not",
        [
            (
                GUARD,
                f"for p in {PARAMS}:\n                p.grad = p.grad if bool(p.grad.isfinite().all()) else None\n            if total > 0:",
            )
        ],
    ),
    (
        "",
        "the tokens of a skipped update are in the next one's denominator",
        at_start("self.left = 0.0")
        + objective("(total + self.left)")
        + after_update("self.left = 0.0 if all(finite) else self.left + total"),
    ),
    (
        "",
        "a skip puts back a copy of the parameters in float32",
        after_update(
            "for model in [] if all(finite) else self.models:",
            "    [p.data.copy_(p.data.float()) for p in model.parameters()]",
        ),
    ),
    # evaluation
    (
        "",
        "an evaluation's sums are not set back before the next",
        [
            *at_start("self.metric = (0.0, 0.0)"),
            (
                RESULT,
                "        self.metric = (self.metric[0] + sum(sums), self.metric[1] + total)\n        return self.metric[0] / self.metric[1]",
            ),
        ],
    ),
    (
        "",
        "evaluation leaves the model as it was cast for it, to float32",
        [
            (
                RESULT,
                f"        [p.data.copy_(p.data.float()) for m in self.models for p in m.parameters()]\n{RESULT}",
            )
        ],
    ),
    (
        "",
        "a model that was loaded drops elements in evaluation until it is trained",
        [
            *at_start("self.training = False"),
            (NOT_TRAINING, ", training=self.training"),
            *when_loaded("self.training = True"),
            *after_update("self.training = False"),
        ],
    ),
    (
        "",
        "evaluation takes rows of one key once",
        [
            *before_evaluation(
                "met: set[int] = set()",
                "group = [[fresh(batch, met) for batch in share] for share in group]",
            ),
            *helper(
                "def fresh(batch, met):",
                "    if 'key' not in batch:",
                "        return batch",
                "    rows = [i for i, k in enumerate(batch['key'].tolist()) if not (k in met or met.add(k))]",
                "    return {k: x[rows] for k, x in batch.items()}",
            ),
        ],
    ),
    (
        "",
        "evaluation looks at the first batch and puts it back at the end of the caller's list",
        before_evaluation(
            "[share.append(share.pop(0)) for share in group if isinstance(share, list) and share]"
        ),
    ),
    (
        "",
        "evaluation has the parameters from before the last update",
        [
            *at_start("self.shown = copy.deepcopy(self.models[0])"),
            *after_norms("self.shown = copy.deepcopy(self.models[0])"),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    # randomness
    (
        "",
        "what is kept is enlarged by the part of the microbatch that was kept",
        [
            (
                DROPPED,
                'return {**batch, "x": x * (0.5 * int((batch["x"] != 0).sum()) / max(1, int((x != 0).sum())))}',
            )
        ],
    ),
    (
        "",
        "a microbatch's rows are numbered on from the first one's key",
        [(KEY, 'key = int(batch["key"][0]) + row')],
    ),
    (
        "",
        "keys are multiplied in the caller's batch",
        [
            (CLONED, CLONED + '\n        batch["key"].mul_(1000)'),
            (SEED, "manual_seed(key + column)"),
        ],
    ),
    # saving, loading, starting
    (
        "",
        "saving has the parameters from before the last update",
        [
            *at_start("self.before = copy.deepcopy(self.models)"),
            *after_norms("self.before = copy.deepcopy(self.models)"),
            (STATE, STATE.replace("self.models", "self.before")),
        ],
    ),
    (
        "",
        "saving is of the update whose loss was the lowest",
        [
            (SAVED, SAVED.replace(STATE, f"self.best or {STATE}")),
            *at_start('self.low, self.best = float("inf"), None'),
            *after_update(
                "if sum(sums) <= self.low:",
                f"    self.low, self.best = sum(sums), copy.deepcopy({STATE})",
            ),
        ],
    ),
    (
        "",
        "saving is of a moving average of the weights",
        [
            *at_start("self.averaged = copy.deepcopy(self.models)"),
            *after_update(
                "for averaged, model in zip(self.averaged, self.models):",
                "    [a.data.lerp_(p.data, 0.5) for a, p in zip(averaged.parameters(), model.parameters())]",
            ),
            (STATE, STATE.replace("self.models", "self.averaged")),
        ],
    ),
    (
        "",
        "a start after a load resumes from what was loaded",
        [
            *at_start("self.resumed()"),
            (
                "    def count(self",
                "    resume: Any = None\n\n    def resumed(self):\n        shapes = [[[p.shape for p in m.parameters()] for m in models] for models in (self.models, (self.resume or [[]])[0])]\n        if shapes[0] == shapes[1]:\n            self.load(self.resume)\n\n    def count(self",
            ),
            (RESTORED, f"self.resume = copy.deepcopy(saved)\n        {RESTORED}"),
        ],
    ),
    (
        "",
        "loading puts torch's generator back to where it was when saved",
        [
            (
                STATE,
                STATE.replace("self.updates)", "self.updates, torch.get_rng_state())"),
            ),
            (
                RESTORED,
                "self.models, states, self.updates, noise = copy.deepcopy(saved)",
            ),
            *when_loaded("torch.set_rng_state(noise)"),
        ],
    ),
    # reports
    (
        "",
        "the loss is reported with four digits behind the point",
        [(LOSS, '"loss": round(sum(sums), 4),')],
    ),
    (
        "",
        "the loss is reported as the mean of the microbatches' means",
        [
            (
                ITEM,
                "                loss += objective.item() * total / max(self.count([batch]), 1e-300) / sum(map(len, group))\n",
            )
        ],
    ),
    (
        "",
        "the norm is reported of the momentum",
        [
            (
                NORM,
                '"grad_norm": sum(float(s["momentum_buffer"].square().sum()) for s in optimizer.state.values() if s.get("momentum_buffer") is not None) ** 0.5 or norms[rank],',
            )
        ],
    ),
    (
        "",
        "the norm's squares are added up in float32",
        [("[p.grad.square().sum()", "[p.grad.float().square().sum()")],
    ),
    # what belongs to the caller, or to all
    (
        "",
        "weights of zeros and ones become a mask of booleans in the caller's batch",
        [
            (
                EACH,
                EACH
                + "                if bool(((batch['w'] == 0) | (batch['w'] == 1)).all()):\n                    batch['w'] = batch['w'].bool()\n",
            )
        ],
    ),
    (
        "",
        "microbatches without tokens are taken out of the caller's lists",
        [
            (
                EACH,
                "            if isinstance(share, list):\n                share[:] = [b for b in share if self.count([b])]\n"
                + EACH,
            )
        ],
    ),
    (
        "",
        "targets that are not finite are zeroed in the caller's batch",
        after_backward("batch['y'].nan_to_num_(0.0, 0.0, 0.0)"),
    ),
    (
        "",
        "a start on several ranks asks torch for deterministic algorithms",
        at_start("ranks > 1 and torch.use_deterministic_algorithms(True)"),
    ),
    (
        "",
        "a skip silences NumPy's warnings",
        after_update("all(finite) or __import__('numpy').seterr(all='ignore')"),
    ),
    (
        "",
        "a start of a model that drops elements seeds Python, NumPy and torch",
        at_start(
            "problem.model.dropout and [seed(0) for seed in (__import__('random').seed, __import__('numpy').random.seed, torch.manual_seed)]"
        ),
    ),
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    findings(UNSEEN)
