"""Lists mistakes in updates without tokens, or with gradients that are not finite (law T7)."""

from benchmarks.mistakes.edits import (
    ADD_LOSS,
    ALL_GROUPS,
    APPEND_LOSS,
    BACKWARD,
    BEGIN_REDUCE,
    CHECK_FINITE,
    CHECK_FINITE_LINE,
    END_START,
    IF_STEP,
    OWN_PARAMS,
    REDUCE,
    STEP,
    SUM_COUNTS,
    ZERO_GRAD,
    after_update,
    at_start,
    before_step,
    divide_by,
    replace,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a step that is skipped leaves the gradients of the microbatches before",
        [
            ("Capabilities(ranks=3,", "Capabilities(ranks=1,"),
            (ZERO_GRAD, ""),
            (
                BACKWARD,
                "                if not objective.isfinite():\n"
                "                    return\n" + BACKWARD,
            ),
            (STEP, STEP + "                optimizer.zero_grad()\n"),
        ],
        law="T7",
        required=True,
    ),
    Mistake(
        "no step where the loss is zero",
        step_only_if("sum(sums) != 0"),
        law="T0",
        required=True,
    ),
    Mistake(
        "a step of nothing resets momentum",
        replace(
            SUM_COUNTS,
            SUM_COUNTS
            + "        [total or o.state.clear() for o in self.optimizers]\n",
        ),
        law="T7",
        required=True,
    ),
    Mistake(
        "a skipped update resets momentum",
        replace(
            IF_STEP,
            "if total > 0 and not finite[rank]:\n"
            "                optimizer.state.clear()\n"
            "            " + IF_STEP,
        ),
        law="T7",
    ),
    Mistake(
        "the loss scale falls after a skip but is not undone so",
        [
            *at_start("self.scale = 65536.0"),
            (BACKWARD, "                (objective * self.scale).backward()\n"),
            (REDUCE, "whole = torch.stack(grads).sum(0) / 65536.0"),
            *after_update("self.scale *= 1.0 if all(finite) else 0.5"),
        ],
    ),
    Mistake(
        "a skip looks for NaN alone",
        replace(CHECK_FINITE, "finite = [n == n for n in norms]"),
    ),
    Mistake(
        "a skip looks for infinity alone",
        replace(CHECK_FINITE, 'finite = [n != float("inf") for n in norms]'),
    ),
    Mistake(
        "a microbatch whose loss is not finite is left out",
        replace(
            BACKWARD,
            "                if not torch.isfinite(objective):\n"
            "                    continue\n" + BACKWARD,
        ),
    ),
    Mistake(
        "what is not finite in a gradient is zeroed",
        replace(
            REDUCE, "whole = torch.nan_to_num(torch.stack(grads).sum(0), 0.0, 0.0, 0.0)"
        ),
    ),
    Mistake(
        "a parameter whose gradient is finite is stepped, where another's is not",
        [
            (IF_STEP, "if total > 0:"),
            *before_step(
                f"[setattr(p, 'grad', None) for p in {OWN_PARAMS} if not p.grad.isfinite().all()]"
            ),
        ],
        law="T7",
        required=True,
    ),
    Mistake(
        "each rank skips by its own gradients",
        [
            (
                "        for params in zip(",
                "        own = [all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters()) for model in self.models]\n"
                "        for params in zip(",
            ),
            (IF_STEP, "if total > 0 and own[rank]:"),
        ],
    ),
    Mistake(
        "the update after a skipped one is skipped",
        (
            at_start("self.found = False")
            + step_only_if("not self.found")
            + after_update("self.found = not all(finite)")
        ),
    ),
    Mistake(
        "no step where the loss is ten times that before",
        (
            at_start("self.last = 0.0")
            + step_only_if("not (self.updates and sum(sums) > 10 * self.last)")
            + after_update("self.last = sum(sums)")
        ),
    ),
    Mistake(
        "no step where less than one whole token counts", step_only_if("int(total) > 0")
    ),
    Mistake(
        "a skip halves the learning rate",
        after_update(
            f"[g.update(lr=g['lr'] * (1 if all(finite) else 0.5)) {ALL_GROUPS}]"
        ),
    ),
    Mistake(
        "two skips in a row lose momentum",
        (
            at_start("self.skipped = 0")
            + after_update(
                "self.skipped = 0 if all(finite) else self.skipped + 1",
                "self.skipped == 2 and [o.state.clear() for o in self.optimizers]",
            )
        ),
    ),
    Mistake(
        "a skip looks at the loss of the ranks' last microbatches",
        [
            ("        sums = []\n", "        sums, last = [], {}\n"),
            (
                ADD_LOSS,
                ADD_LOSS + "                last[model] = bool(objective.isfinite())\n",
            ),
            (CHECK_FINITE, "finite = [all(last.values())] * len(norms)"),
        ],
    ),
    Mistake(
        "the norm's squares overflow in float16, which is skipped",
        replace(
            CHECK_FINITE,
            "finite = [bool(torch.tensor(n * n).half().isfinite()) for n in norms]",
        ),
    ),
    Mistake(
        "what is not finite takes the last update back",
        [
            *at_start("self.good = None"),
            (
                CHECK_FINITE,
                CHECK_FINITE + "\n"
                "        for model, good in zip(self.models, self.good or []):\n"
                "            all(finite) or model.load_state_dict(good)\n"
                "        self.good = [copy.deepcopy(model.state_dict()) for model in self.models]",
            ),
        ],
    ),
    Mistake(
        "what is not finite does not overwrite the gradients of the last update, which are stepped",
        [
            *at_start("self.buffer = None"),
            (
                CHECK_FINITE,
                CHECK_FINITE + "\n"
                "        if all(finite):\n"
                "            self.buffer = [[p.grad.clone() for p in m.parameters()] for m in self.models]\n"
                "        elif self.buffer:\n"
                "            finite = [True] * len(finite)\n"
                "            for m, grads in zip(self.models, self.buffer):\n"
                "                for p, g in zip(m.parameters(), grads):\n"
                "                    p.grad = g.clone()",
            ),
        ],
    ),
    Mistake(
        "the loss scale grows at the third finite update in a row before that is unscaled",
        [
            *at_start("self.scale, self.row = 8.0, 0"),
            (BACKWARD, "                (objective * self.scale).backward()\n"),
            (
                BEGIN_REDUCE,
                "        self.row += 1\n"
                "        scale = self.scale * (1 if self.row % 3 else 2)\n"
                + BEGIN_REDUCE,
            ),
            (REDUCE, "whole = torch.stack(grads).sum(0) / scale"),
            *after_update(
                "self.scale, self.row = scale, self.row if all(finite) else 0"
            ),
        ],
    ),
    Mistake(
        "leaves that are finite are stepped where others are not",
        replace(
            IF_STEP,
            f"for p in {OWN_PARAMS}:\n"
            "                p.grad = p.grad if bool(p.grad.isfinite().all()) else None\n"
            "            if total > 0:",
        ),
    ),
    Mistake(
        "the tokens of a skipped update are in the next one's denominator",
        (
            at_start("self.left = 0.0")
            + divide_by("(total + self.left)")
            + after_update("self.left = 0.0 if all(finite) else self.left + total")
        ),
    ),
    Mistake(
        "a skip puts back a copy of the parameters in float32",
        after_update(
            "for model in [] if all(finite) else self.models:",
            "    [p.data.copy_(p.data.float()) for p in model.parameters()]",
        ),
    ),
    Mistake(
        "a group without tokens steps: momentum and weight decay act",
        replace(IF_STEP, "if finite[rank]:"),
    ),
    Mistake(
        "a nonfinite update zeroes its gradients and steps all the same: momentum and weight decay act",
        replace(
            STEP,
            STEP + "            elif total > 0:\n"
            "                optimizer.zero_grad(set_to_none=False)\n"
            "                optimizer.step()\n",
        ),
    ),
    Mistake(
        "a rank with nonfinite gradients throws away its own share and the others' update goes on",
        replace(
            APPEND_LOSS,
            APPEND_LOSS
            + "            grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
            "            if not all(bool(grad.isfinite().all()) for grad in grads):\n"
            "                model.zero_grad()\n",
        ),
    ),
    Mistake(
        "the overflow flag is never cleared: after one nonfinite update all are skipped",
        [
            (END_START, END_START + "        self.overflow = False\n"),
            (
                CHECK_FINITE_LINE,
                '        self.overflow = self.overflow or not all(n < float("inf") for n in norms)\n'
                "        finite = [not self.overflow for _ in norms]\n",
            ),
        ],
    ),
    Mistake(
        "only the first rank's gradient is asked whether it is finite",
        replace("for g in total):", "for g in parts[0]):"),
        base="Clip",
    ),
    Mistake(
        "the parameters are put back, but the momentum has seen the step",
        [
            (
                "if not all(bool(torch.isfinite(g).all()) for g in total):\n"
                "            return",
                "kept = [p.detach().clone() for p in self.params]",
            ),
            (
                "self.optimizer.step()",
                "self.optimizer.step()\n"
                "if not all(bool(torch.isfinite(g).all()) for g in total):\n"
                "    with torch.no_grad():\n"
                "        for p, old in zip(self.params, kept):\n"
                "            p.copy_(old)\n"
                "    return",
            ),
        ],
        base="Clip",
    ),
]
