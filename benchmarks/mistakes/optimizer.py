"""Lists mistakes in the optimizer and its learning rate (laws T0 and T1)."""

from benchmarks.mistakes.edits import (
    ALL_GROUPS,
    BACKWARD,
    FOR_BATCH,
    OWN_GROUPS,
    OWN_MOMENTUM,
    OWN_PARAMS,
    SUM_COUNTS,
    ZERO_GRAD,
    after_count,
    after_step,
    after_update,
    at_start,
    before_step,
    replace,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "the fourth update is twice as long",
        before_step(
            "[p.grad.mul_(1 + (self.updates == 3)) for p in self.models[rank].parameters()]"
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "the fifth update is left out",
        step_only_if("self.updates != 4"),
        law="T0",
        required=True,
    ),
    Mistake(
        "before the sixth update momentum is lost",
        before_step("self.updates == 5 and optimizer.state.clear()"),
        law="T0",
        required=True,
    ),
    Mistake(
        "momentum is lost when the number of microbatches changes",
        (
            before_step(
                "len(group[rank]) == getattr(self, 'k', len(group[rank])) or optimizer.state.clear()"
            )
            + after_update("self.k = len(group[-1])")
        ),
        law="T1",
        required=True,
    ),
    Mistake(
        "weight decay once for each microbatch",
        before_step(
            "[p.grad.add_(p.data, alpha=self.problem.weight_decay * max(0, len(group[0]) - 1)) "
            "for p in self.models[rank].parameters()]"
        ),
        law="T1",
        required=True,
    ),
    Mistake(
        "the bias does not decay",
        before_step(
            "[p.grad.sub_(self.problem.weight_decay * p.data) "
            "for p in self.models[rank].parameters() if p.ndim == 0]"
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "the sixth update is turned round",
        before_step(
            "[p.grad.mul_(1 - 2 * (self.updates == 5)) for p in self.models[rank].parameters()]"
        ),
        law="T0",
    ),
    Mistake(
        "momentum is averaged with zero at the second update",
        before_step(
            "[s['momentum_buffer'].mul_(0.5) for s in optimizer.state.values() if self.updates == 2 and s.get('momentum_buffer') is not None]"
        ),
        law="T0",
    ),
    Mistake(
        "the learning rate falls with updates",
        before_step(
            "[g.update(lr=self.problem.learning_rate * (0.9 if self.updates >= 4 else 1)) for g in optimizer.param_groups]"
        ),
        law="T0",
    ),
    Mistake(
        "the learning rate warms up over microbatches",
        [
            *at_start("self.seen = 0"),
            (SUM_COUNTS, SUM_COUNTS + "        self.seen += max(map(len, group))\n"),
            *before_step(
                "[g.update(lr=self.problem.learning_rate * min(1, self.seen / 2)) for g in optimizer.param_groups]"
            ),
        ],
    ),
    Mistake(
        "weight decay is decoupled",
        before_step(
            "[g.update(weight_decay=0) for g in optimizer.param_groups], [p.data.mul_(1 - self.problem.learning_rate * self.problem.weight_decay) for p in self.models[rank].parameters()]"
        ),
    ),
    Mistake(
        "a leaf whose gradient is zero is not stepped",
        before_step(
            "[setattr(p, 'grad', None) for p in self.models[rank].parameters() if not p.grad.any()]"
        ),
    ),
    Mistake(
        "a momentum of zero is taken for none given",
        at_start(f"[g.update(momentum=problem.momentum or 0.9) {ALL_GROUPS}]"),
    ),
    Mistake(
        "momentum is Nesterov's",
        at_start(f"[g.update(nesterov=problem.momentum > 0) {ALL_GROUPS}]"),
    ),
    Mistake(
        "momentum is kept in bfloat16",
        after_step(
            f"[s['momentum_buffer'].copy_(s['momentum_buffer'].bfloat16()) {OWN_MOMENTUM}]"
        ),
    ),
    Mistake(
        "a leaf without dimensions has no momentum",
        before_step(
            f"[optimizer.state.pop(p, None) for p in {OWN_PARAMS} if p.ndim == 0]"
        ),
    ),
    Mistake(
        "the learning rate follows the tokens over those of the first update",
        (
            at_start("self.first = 0.0")
            + after_count("self.first = self.first or total")
            + before_step(
                f"[g.update(lr=self.problem.learning_rate * total / self.first) {OWN_GROUPS}]"
            )
        ),
    ),
    Mistake(
        "no step after the first 150 tokens",
        (
            at_start("self.spent = 0.0")
            + step_only_if("self.spent <= 150")
            + after_update("self.spent += total")
        ),
    ),
    Mistake(
        "momentum is dampened",
        at_start(f"[g.update(dampening=problem.momentum) {ALL_GROUPS}]"),
    ),
    Mistake(
        "parameters are rounded to float32 after the step",
        after_step(f"[p.data.copy_(p.data.float()) for p in {OWN_PARAMS}]"),
    ),
    Mistake(
        "the momentum of the first update lies in the memory of the gradients",
        [
            (ZERO_GRAD, ZERO_GRAD.replace("()", "(set_to_none=False)")),
            *after_step(
                f"[optimizer.state[p].update(momentum_buffer=p.grad.copy_(optimizer.state[p]['momentum_buffer'])) for p in {OWN_PARAMS} if self.problem.momentum and not self.updates]"
            ),
        ],
    ),
    Mistake(
        "the decay warms up from nothing at the first update",
        before_step(
            f"[g.update(weight_decay=self.problem.weight_decay * min(1, self.updates)) {OWN_GROUPS}]"
        ),
    ),
    Mistake(
        "momentum warms up over three updates",
        before_step(
            f"[g.update(momentum=self.problem.momentum * min(1.0, (self.updates + 1) / 3)) {OWN_GROUPS}]"
        ),
    ),
    Mistake(
        "the learning rate is a tensor of the default dtype",
        at_start(
            f"[g.update(lr=float(torch.tensor(problem.learning_rate))) {ALL_GROUPS}]"
        ),
    ),
    Mistake(
        "parameters are rounded to float32 at random, by an unseeded generator",
        (
            at_start("self.dither = torch.Generator(); self.dither.seed()")
            + after_step(
                f"[p.data.copy_((p.data * (1 + 2**-24 * (2 * torch.rand(p.shape, generator=self.dither, dtype=p.dtype) - 1))).float()) for p in {OWN_PARAMS}]"
            )
        ),
    ),
    Mistake(
        "elements whose gradient is zero are not touched",
        (
            before_step(
                f"kept = [(p, p.grad == 0, p.detach().clone()) for p in {OWN_PARAMS}]"
            )
            + after_step(
                "[p.data.copy_(torch.where(zero, old, p.data)) for p, zero, old in kept]"
            )
        ),
    ),
    Mistake(
        "weight decay is added once more for every microbatch after the first",
        [
            (FOR_BATCH, "            for step, batch in enumerate(share):\n"),
            (
                BACKWARD,
                '                decay = self.optimizers[len(sums)].param_groups[0]["weight_decay"] / 2 * (step > 0)\n'
                "                (objective + decay * sum(p.square().sum() for p in model.parameters())).backward()\n",
            ),
        ],
    ),
    Mistake(
        "the schedule goes on with each microbatch",
        replace(
            "self.schedule.step()",
            "for _ in range(sum(map(len, group))):\n    self.schedule.step()",
        ),
        base="Adam",
    ),
    Mistake(
        "the schedule goes on once for each rank",
        replace(
            "self.schedule.step()",
            "for _ in group:\n    self.schedule.step()",
        ),
        base="Adam",
        law="T2",
        required=True,
    ),
    Mistake(
        "the schedule goes on in an update without tokens",
        replace(
            "if count == 0:\n            return",
            "if count == 0:\n    self.schedule.step()\n    return",
        ),
        base="Adam",
    ),
    Mistake(
        "weight decay is added for each microbatch",
        [
            (
                "gradient[name] += g / count",
                "gradient[name] += g / count + self.problem.weight_decay * self.params[name]",
            ),
            ("g = gradient[name] + decay * p", "g = gradient[name]"),
        ],
        base="Manual",
    ),
    Mistake(
        "weight decay is decoupled from the momentum",
        [
            ("g = gradient[name] + decay * p", "g = gradient[name]"),
            (
                "p - rate * self.velocity[name]",
                "p - rate * (self.velocity[name] + decay * p)",
            ),
        ],
        base="Manual",
    ),
    Mistake(
        "steps on zeroed gradients in an update without tokens",
        [
            ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
            ("    if count == 0:\n        return None\n", ""),
            (
                "p.grad.div_(count)",
                "if p.grad is not None and count:\n    p.grad.div_(count)",
            ),
            (
                'return {"loss": loss_sum / count}',
                'return {"loss": loss_sum / count} if count else None',
            ),
        ],
        base="divide_once",
    ),
    Mistake(
        "the rate by tokens consumed counts padding",
        replace(
            "return float(count)",
            "return sum(self.problem.weights(b).numel() for share in group for b in share)",
        ),
        base="TokenSchedule",
        law="T4",
        required=True,
    ),
    Mistake(
        "the tokens consumed are not saved",
        replace("self.consumed = saved[1]", "pass"),
        base="TokenSchedule",
        law="T16",
        required=True,
    ),
    Mistake(
        "tokens consumed before are those of the first microbatch, times the number of microbatches",
        [
            ("self.consumed += self.consume(group, count)\n", ""),
            (
                'options["lr"] = 0.2 / (1 + self.consumed / 8)',
                'options["lr"] = 0.2 / (1 + self.consumed / 8)\n'
                "self.consumed += sum(\n"
                "    len(share) * float(self.problem.weights(share[0]).sum())\n"
                "    for share in group if share\n"
                ")",
            ),
        ],
        base="TokenSchedule",
        law="T1",
        required=True,
    ),
    Mistake(
        "the rate by tokens consumed before counts padding",
        [
            ("self.consumed += self.consume(group, count)\n", ""),
            (
                'options["lr"] = 0.2 / (1 + self.consumed / 8)',
                'options["lr"] = 0.2 / (1 + self.consumed / 8)\n'
                "self.consumed += sum(\n"
                "    self.problem.weights(b).numel() for share in group for b in share\n"
                ")",
            ),
        ],
        base="TokenSchedule",
        law="T4",
        required=True,
    ),
    Mistake(
        "float32 copies are made anew from half precision after a load",
        replace("master.copy_(kept)", "master.copy_(kept.bfloat16())"),
        base="Masters",
        law="T16",
        required=True,
    ),
]
