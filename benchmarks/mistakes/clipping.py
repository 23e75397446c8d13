"""Lists mistakes in clipping, and clipping that is not part of the update (laws T0, T1 and T2)."""

from benchmarks.mistakes.edits import (
    BACKWARD,
    CHECK_FINITE,
    COMPUTE_NORMS,
    OWN_PARAMS,
    at_start,
    before_step,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "gradients above 8 are clipped",
        before_step(
            "torch.nn.utils.clip_grad_norm_(self.models[rank].parameters(), 8.0)"
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "gradients above 100 are clipped",
        before_step(
            "torch.nn.utils.clip_grad_norm_(self.models[rank].parameters(), 100.0)"
        ),
        law="T0",
    ),
    Mistake(
        "elements of gradients above 3 are clipped",
        before_step(
            "torch.nn.utils.clip_grad_value_(self.models[rank].parameters(), 3.0)"
        ),
        law="T0",
    ),
    Mistake(
        "what has been added up is clipped between microbatches",
        replace(
            BACKWARD,
            BACKWARD + "                if batch is not share[-1]:\n"
            "                    torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)\n",
        ),
    ),
    Mistake(
        "several ranks clip their own gradients before the reduction",
        replace(
            "        for params in zip(",
            "        if len(group) > 1:\n"
            "            [torch.nn.utils.clip_grad_norm_(m.parameters(), 2.0) for m in self.models]\n"
            "        for params in zip(",
        ),
    ),
    Mistake(
        "a norm of more than twice that before is clipped",
        [
            *at_start('self.limit = float("inf")'),
            (
                CHECK_FINITE,
                CHECK_FINITE + "\n"
                "        if all(finite) and norms[0] > self.limit:\n"
                "            [torch.nn.utils.clip_grad_norm_(m.parameters(), self.limit) for m in self.models]\n"
                "        self.limit = 2 * norms[0] if all(finite) and norms[0] > 0 else self.limit",
            ),
        ],
    ),
    Mistake(
        "clipping to one enlarges what is shorter",
        before_step(f"[p.grad.mul_(1 / (norms[rank] + 1e-6)) for p in {OWN_PARAMS}]"),
    ),
    Mistake(
        "a leaf's gradient is at most twenty times as long as the leaf",
        before_step(
            f"[p.grad.mul_(min(1.0, 20 * max(float(p.detach().norm()), 1e-3) / max(float(p.grad.norm()), 1e-300))) for p in {OWN_PARAMS}]"
        ),
    ),
    Mistake(
        "gradients are clipped by a default norm of 0.5 that nobody asked for",
        replace(
            COMPUTE_NORMS,
            COMPUTE_NORMS.replace(
                "norm(model)",
                "float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))",
            ),
        ),
    ),
    Mistake(
        "local gradients are clipped after every microbatch, before the reduction",
        replace(
            BACKWARD,
            BACKWARD
            + "                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
        ),
    ),
    Mistake(
        "each microbatch's gradient is clipped",
        replace("zip(local, grads,", "zip(local, self.clip(grads)[0],"),
        base="Clip",
    ),
    Mistake(
        "the sum is clipped before it is divided by the count",
        replace(
            "clipped, norm = self.clip(total)",
            "clipped, norm = self.clip([g * count for g in total])\n"
            "clipped, norm = [g / count for g in clipped], norm / count",
        ),
        base="Clip",
    ),
    Mistake(
        "each rank clips its own before they are reduced",
        replace("parts.append(local)", "parts.append(self.clip(local)[0])"),
        base="Clip",
    ),
]
