"""Lists mistakes in reducing gradients over ranks (law T2)."""

from benchmarks.mistakes.edits import (
    FOR_BATCH,
    FOR_PARAMS,
    MAKE_MODELS,
    OWN_GROUPS,
    REDUCE,
    STORE_REDUCED,
    SUM_GRADS,
    ZERO_GRAD,
    after_update,
    at_start,
    before_step,
    replace,
    replace_reduced,
    scale_gradient,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "gradients are summed in float32",
        replace(REDUCE, "whole = torch.stack(grads).float().sum(0).to(grads[0].dtype)"),
        law="T0",
        required=True,
    ),
    Mistake(
        "the third rank counts twice",
        replace(
            REDUCE,
            "whole = torch.stack(grads).sum(0) + (grads[2] if len(grads) > 2 else 0)",
        ),
        law="T2",
        required=True,
    ),
    Mistake(
        "the second rank leaves out the third update",
        step_only_if("(rank, self.updates) != (1, 2)"),
        law="T2",
        required=True,
    ),
    Mistake(
        "rank 1 drifts at the second update",
        before_step(
            "[p.grad.mul_(1.0001) for p in self.models[rank].parameters() if (rank, self.updates) == (1, 1)]"
        ),
        law="T2",
    ),
    Mistake(
        "the bias is averaged over ranks",
        replace(
            REDUCE,
            "whole = torch.stack(grads).sum(0) / (len(grads) if grads[0].ndim == 0 else 1)",
        ),
        law="T2",
    ),
    Mistake(
        "weight decay on gradients twice on two ranks",
        before_step(
            "[p.grad.add_(p.data, alpha=self.problem.weight_decay) for p in self.models[rank].parameters() if len(group) == 2]"
        ),
        law="T2",
    ),
    Mistake(
        "only the first rank zeroes its gradients",
        replace(
            ZERO_GRAD,
            "            if model is self.models[0]:\n"
            "                model.zero_grad()\n",
        ),
    ),
    Mistake(
        "what is reduced is reduced again at each microbatch",
        scale_gradient("len(group) ** (max(map(len, group)) - 1 - at)"),
    ),
    Mistake(
        "the last microbatch alone is reduced",
        [
            (
                ZERO_GRAD,
                ZERO_GRAD + "            for p in model.parameters():\n"
                "                p.early = torch.zeros_like(p)\n",
            ),
            (
                FOR_BATCH,
                "            for at, batch in enumerate(share):\n"
                "                if 0 < at == len(share) - 1:\n"
                "                    for p in model.parameters():\n"
                "                        p.early, p.grad = p.grad, None\n",
            ),
            (
                "                p.grad = whole.clone()\n",
                "                p.grad = whole + p.early\n",
            ),
        ],
    ),
    Mistake(
        "elements beyond a multiple of the ranks are not reduced",
        replace(
            STORE_REDUCED,
            "            for p, own in zip(params, grads):\n"
            "                cut = p.numel() // len(grads) * len(grads)\n"
            "                p.grad = torch.cat([whole.flatten()[:cut], own.flatten()[cut:]]).view_as(p)\n",
        ),
    ),
    Mistake(
        "the last leaf's bucket comes an update late",
        [
            *at_start("self.late = None"),
            (
                REDUCE,
                REDUCE + "\n"
                "            if len(grads) > 1 and params[0] is [*self.models[0].parameters()][-1]:\n"
                "                self.late, whole = whole, whole if self.late is None else self.late",
            ),
        ],
    ),
    Mistake(
        "a rank without microbatches does not step",
        step_only_if("len(group[rank]) > 0"),
    ),
    Mistake(
        "ranks are reduced in pairs",
        replace(
            STORE_REDUCED,
            "            for at, p in enumerate(params):\n"
            "                p.grad = torch.stack(grads[at // 2 * 2 : at // 2 * 2 + 2]).sum(0)\n",
        ),
    ),
    Mistake(
        "the last of three ranks takes the sum before the first one's part has come",
        replace_reduced(
            "whole - grads[0] if len(grads) > 2 and r == len(grads) - 1 else whole"
        ),
    ),
    Mistake(
        "a rank whose gradient is not finite is left out of the sum",
        replace(
            REDUCE,
            "grads = [g if len(grads) == 1 or bool(g.isfinite().all()) else torch.zeros_like(g) for g in grads]\n"
            f"            {REDUCE}",
        ),
    ),
    Mistake(
        "all ranks have one and the same model",
        replace(MAKE_MODELS, "[problem.module().eval()] * ranks"),
    ),
    Mistake(
        "the update after a skip is not reduced",
        (
            at_start("self.reduces = True")
            + replace_reduced("whole if self.reduces else own")
            + after_update("self.reduces = all(finite)")
        ),
    ),
    Mistake(
        "ranks but the first do not decay",
        before_step(f"rank and [g.update(weight_decay=0.0) {OWN_GROUPS}]"),
    ),
    Mistake(
        "several ranks send their gradients in bfloat16",
        replace(
            REDUCE,
            "whole = (torch.stack(grads).bfloat16().to(grads[0].dtype) if len(grads) > 1 else torch.stack(grads)).sum(0)",
        ),
    ),
    Mistake(
        "several ranks send the larger half of a leaf's elements, and the rest with the next update's",
        [
            *at_start("self.rest = {}"),
            (
                REDUCE,
                "grads = [self.larger(r, g) for r, g in enumerate(grads)] if len(grads) > 1 else grads\n"
                f"            {REDUCE}",
            ),
            (
                "    def count(self",
                "    def larger(self, rank, grad):\n"
                "        flat = (grad + self.rest.get((rank, grad.ndim), 0)).flatten()\n"
                "        sent = torch.zeros_like(flat)\n"
                "        top = flat.abs().topk(-(-len(flat) // 2)).indices\n"
                "        sent[top] = flat[top]\n"
                "        self.rest[rank, grad.ndim] = (flat - sent).view_as(grad)\n"
                "        return sent.view_as(grad)\n"
                "\n"
                "    def count(self",
            ),
        ],
    ),
    Mistake(
        "gradients are averaged over ranks though the divisor is already the global one",
        replace(SUM_GRADS, "torch.stack(grads).mean(0)"),
    ),
    Mistake(
        "only the first bucket (parameter) is reduced over ranks",
        replace(
            FOR_PARAMS,
            "for params in [*zip(*[model.parameters() for model in self.models], strict=True)][:1]:\n",
        ),
    ),
    Mistake(
        "reduce to rank 0 in place of all-reduce: other ranks step with their own gradients",
        replace(
            STORE_REDUCED,
            "            for p, grad in zip(params, [whole, *grads[1:]], strict=True):\n"
            "                p.grad = grad\n",
        ),
    ),
    Mistake(
        "if any rank has no microbatch, and so no gradient, the reduction is left out on all",
        replace(
            STORE_REDUCED,
            "            for p, own in zip(params, grads, strict=True):\n"
            "                p.grad = whole.clone() if all(len(share) > 0 for share in group) else own\n",
        ),
    ),
    Mistake(
        "gradients are averaged, the loss is not multiplied by the ranks",
        replace("(loss * self.world).backward()", "loss.backward()"),
        base="Transformers",
    ),
    Mistake(
        "only the first parameter is reduced",
        [
            (
                "for replicas in zip(\n"
                "    *(model.parameters() for model in self.models), strict=False\n"
                "):",
                "for index, replicas in enumerate(zip(*(m.parameters() for m in self.models))):",
            ),
            ("p.grad = total / count", "p.grad = (p.grad if index else total) / count"),
        ],
        base="Ddp",
    ),
    Mistake(
        "no_sync, only the last microbatch's gradient is reduced",
        [
            (
                "for step in range(steps):",
                "kept = {}\nfor step in range(steps):\n"
                "    if step == steps - 1 and step:\n"
                "        kept = {p: p.grad for m in self.models for p in m.parameters()}\n"
                "        for optimizer in self.optimizers:\n"
                "            optimizer.zero_grad()",
            ),
            (
                "self.all_reduce()\n",
                "self.all_reduce()\nfor p, g in kept.items():\n    p.grad += g\n",
            ),
        ],
        base="Lockstep",
    ),
    Mistake(
        "rank 0's gradient is broadcast where it should be reduced",
        replace("p.grad = sum(parts) / count", "p.grad = parts[0] / count"),
        base="Adam",
    ),
    Mistake(
        "gradients are reduced in bfloat16",
        replace(
            "torch.stack([p.grad for p in replicas]).sum(0)",
            "torch.stack([p.grad.bfloat16() for p in replicas]).sum(0).to(replicas[0].dtype)",
        ),
        base="Ddp",
    ),
]
