"""Lists mistakes in saving (law T16)."""

from benchmarks.mistakes.edits import (
    REBUILD_OPTIMIZERS,
    SAVE,
    STATE,
    UNPACK_SAVED,
    UNPACK_SAVED_LINE,
    after_norms,
    after_save,
    after_update,
    at_start,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "the saved state is the live one",
        [(SAVE, f"        return {STATE}\n"), ("= copy.deepcopy(saved)", "= saved")],
    ),
    Mistake(
        "saving frees the momentum",
        replace(
            SAVE,
            SAVE.replace("return", "saved =")
            + "        [o.state.clear() for o in self.optimizers]\n"
            "        return saved\n",
        ),
    ),
    Mistake(
        "a saved momentum goes on with the run",
        replace(
            SAVE,
            "        return copy.deepcopy(self.models), [o.state_dict() for o in self.optimizers], self.updates\n",
        ),
    ),
    Mistake(
        "weights are saved in float32",
        [
            (
                SAVE,
                "        models = [copy.deepcopy(model).float() for model in self.models]\n"
                + SAVE.replace("(self.models,", "(models,"),
            ),
            (
                REBUILD_OPTIMIZERS,
                "        kind = next(self.problem.module().parameters()).dtype\n"
                "        self.models = [model.to(kind) for model in self.models]\n"
                + REBUILD_OPTIMIZERS,
            ),
        ],
    ),
    Mistake(
        "a leaf without dimensions is not saved",
        replace(
            REBUILD_OPTIMIZERS,
            "        for model in self.models:\n"
            "            for p, new in zip(model.parameters(), self.problem.module().parameters()):\n"
            "                p.data = p.data if p.ndim else new.data\n"
            + REBUILD_OPTIMIZERS,
        ),
    ),
    Mistake(
        "what was saved at this number of updates is not saved again",
        replace(
            SAVE,
            SAVE.replace(
                "return ", "self.kept = getattr(self, 'kept', {})\n        saved = "
            )
            + "        return self.kept.setdefault(self.updates, saved)\n",
        ),
    ),
    Mistake(
        "a later checkpoint overwrites the one before",
        [
            (
                "    capabilities = Capabilities(",
                "    disk: dict[str, Any] = {}\n    capabilities = Capabilities(",
            ),
            (
                SAVE,
                SAVE.replace("return ", 'self.disk["last"] = ')
                + '        return "last"\n',
            ),
            (UNPACK_SAVED, UNPACK_SAVED.replace("saved", "self.disk[saved]")),
        ],
    ),
    Mistake(
        "saving halves the precision of the parameters in use",
        after_save(
            "[p.data.copy_(p.data.half()) for m in self.models for p in m.parameters()]"
        ),
    ),
    Mistake(
        "after a save the optimizers move parameters that are no longer in use",
        after_save("self.models = copy.deepcopy(self.models)"),
    ),
    Mistake(
        "saving has the parameters from before the last update",
        [
            *at_start("self.before = copy.deepcopy(self.models)"),
            *after_norms("self.before = copy.deepcopy(self.models)"),
            (STATE, STATE.replace("self.models", "self.before")),
        ],
    ),
    Mistake(
        "saving is of the update whose loss was the lowest",
        [
            (SAVE, SAVE.replace(STATE, f"self.best or {STATE}")),
            *at_start('self.low, self.best = float("inf"), None'),
            *after_update(
                "if sum(sums) <= self.low:",
                f"    self.low, self.best = sum(sums), copy.deepcopy({STATE})",
            ),
        ],
    ),
    Mistake(
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
    Mistake(
        "the checkpoint holds the weights in half precision",
        replace(
            UNPACK_SAVED_LINE,
            UNPACK_SAVED_LINE
            + "        for p in [p for model in self.models for p in model.parameters()]:\n"
            "            p.data = p.data.half().to(p.dtype)\n",
        ),
    ),
    Mistake(
        "saved by reference, and a new start resets the same modules in place",
        [
            (
                "self.models = [problem.module() for _ in range(ranks)]",
                "if len(getattr(self, 'models', ())) != ranks:\n"
                "    self.models = [problem.module() for _ in range(ranks)]\n"
                "for model in self.models:\n"
                "    model.load_state_dict(problem.module().state_dict())",
            ),
            (
                "return copy.deepcopy(\n"
                "    [self.models[0].state_dict(), self.optimizers[0].state_dict()]\n"
                ")",
                "return [self.models[0].state_dict(), self.optimizers[0].state_dict()]",
            ),
        ],
        base="Transformers",
    ),
    Mistake(
        "the checkpoint has parameters in bfloat16",
        [
            (
                "return self.state\n",
                "return self.state._replace(params={k: v.bfloat16() for k, v in self.state.params.items()})\n",
            ),
            (
                "self.state = saved",
                "params = {k: v.to(self.state.params[k].dtype) for k, v in saved.params.items()}\n"
                "self.state = saved._replace(params=params)",
            ),
        ],
        base="Optax",
    ),
]
