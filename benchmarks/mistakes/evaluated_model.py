"""Lists mistakes in the model that an evaluation sees, and in what it leaves behind (laws T6, T15 and T16)."""

from benchmarks.mistakes.edits import (
    ALL_GROUPS,
    COUNT_EVALUATED,
    NOT_TRAINING,
    RETURN_EVALUATED,
    RETURN_EVALUATED_LINE,
    after_load,
    after_norms,
    after_update,
    at_start,
    before_evaluation,
    divide_by,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "evaluation drops elements",
        replace(", training=False", ""),
        law="T15",
        required=True,
    ),
    Mistake(
        "evaluation forgets momentum",
        replace(
            "        return sum(sums) / total",
            "        [o.state.clear() for o in self.optimizers]\n"
            "        return sum(sums) / total",
        ),
        law="T6",
        required=True,
    ),
    Mistake(
        "evaluation moves the parameters",
        replace(
            "        return sum(sums) / total",
            "        [p.data.mul_(1.001) for m in self.models for p in m.parameters()]\n"
            "        return sum(sums) / total",
        ),
        law="T6",
    ),
    Mistake(
        "evaluation is of a copy made once",
        [
            *at_start("self.shown = None"),
            (
                COUNT_EVALUATED,
                COUNT_EVALUATED
                + "        self.shown = copy.deepcopy(self.models[0]) if self.shown is None else self.shown\n",
            ),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    Mistake(
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
    Mistake(
        "an evaluation is kept until the next update",
        [
            *at_start("self.evaluated = None"),
            *before_evaluation(
                "if self.evaluated and self.evaluated[0] == self.updates:",
                "    return self.evaluated[1]",
            ),
            (
                RETURN_EVALUATED,
                "        self.evaluated = (self.updates, sum(sums) / total)\n"
                "        return self.evaluated[1]",
            ),
        ],
    ),
    Mistake(
        "an evaluation that is no better halves the learning rate",
        [
            *at_start('self.best = float("inf")'),
            (
                RETURN_EVALUATED,
                "        if sum(sums) / total >= self.best:\n"
                f"            [g.update(lr=g['lr'] / 2) {ALL_GROUPS}]\n"
                "        self.best = min(self.best, sum(sums) / total)\n"
                f"{RETURN_EVALUATED}",
            ),
        ],
    ),
    Mistake(
        "evaluation is of the model that a load has replaced",
        [
            *at_start("self.shown = self.models[0]"),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    Mistake(
        "the update after an evaluation is divided by the evaluation's tokens",
        [
            *at_start("self.items = None"),
            (COUNT_EVALUATED, COUNT_EVALUATED + "        self.items = total\n"),
            *divide_by("(self.items or total)"),
            *after_update("self.items = None"),
        ],
    ),
    Mistake(
        "evaluation rounds its inputs to bfloat16",
        before_evaluation(
            "group = [[{**b, 'x': b['x'].bfloat16().to(b['x'].dtype)} for b in s] for s in group]"
        ),
    ),
    Mistake(
        "evaluation is of the batches that it was first given",
        (
            at_start("self.held = None")
            + before_evaluation("self.held = self.held or group", "group = self.held")
        ),
    ),
    Mistake(
        "evaluation freezes the model and thaws what has dimensions",
        before_evaluation(
            "[p.requires_grad_(p.ndim > 0) for p in self.models[0].parameters()]"
        ),
    ),
    Mistake(
        "evaluation leaves the model as it was cast for it, to float32",
        replace(
            RETURN_EVALUATED,
            "        [p.data.copy_(p.data.float()) for m in self.models for p in m.parameters()]\n"
            f"{RETURN_EVALUATED}",
        ),
    ),
    Mistake(
        "a model that was loaded drops elements in evaluation until it is trained",
        [
            *at_start("self.training = False"),
            (NOT_TRAINING, ", training=self.training"),
            *after_load("self.training = True"),
            *after_update("self.training = False"),
        ],
    ),
    Mistake(
        "evaluation has the parameters from before the last update",
        [
            *at_start("self.shown = copy.deepcopy(self.models[0])"),
            *after_norms("self.shown = copy.deepcopy(self.models[0])"),
            ("self.weighted_sum(self.models[0], b", "self.weighted_sum(self.shown, b"),
        ],
    ),
    Mistake(
        "evaluation shares the loss meter with training: its loss shows up in the training's report",
        replace(
            RETURN_EVALUATED_LINE,
            "        for said in self.reports:\n"
            "            if said:\n"
            '                said["loss"] = sum(sums) / total\n'
            + RETURN_EVALUATED_LINE,
        ),
    ),
    Mistake(
        "the moving average is not saved",
        replace("self.average.load_state_dict(saved[1])", "pass"),
        base="Averaged",
        law="T16",
        required=True,
    ),
    Mistake(
        "the moving average moves once for each microbatch",
        replace(
            "def after_step(self) -> None:",
            "def before_step(self, group: Group, count: Tensor) -> None:\n"
            "    self.times = sum(map(len, group))\n\n"
            "def after_step(self) -> None:\n"
            "  for _ in range(self.times):",
        ),
        base="Averaged",
        law="T1",
        required=True,
    ),
    Mistake(
        "evaluates the parameters while the moving average is shown",
        replace("model, self.model = self.model, self.average", "model = self.model"),
        base="Averaged",
        law="T0",
        required=True,
    ),
]
