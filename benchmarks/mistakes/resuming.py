"""Lists mistakes in loading, and in starting behind a load (law T16)."""

from benchmarks.mistakes.edits import (
    BEGIN_UPDATE,
    END_START,
    LOAD_OPTIMIZER,
    OWN_GROUPS,
    REBUILD_OPTIMIZERS,
    REDUCE,
    STATE,
    UNPACK_SAVED,
    UNPACK_SAVED_LINE,
    ZERO_GRAD,
    after_load,
    after_update,
    at_start,
    before_step,
    replace,
    replace_group,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "momentum is lost on load",
        replace("optimizer.load_state_dict(state)", "pass"),
        law="T16",
        required=True,
    ),
    Mistake(
        "only the state of rank 0 is put back",
        replace(
            "            optimizer.load_state_dict(state)",
            "            optimizer is self.optimizers[0] and optimizer.load_state_dict(state)",
        ),
        law="T16",
    ),
    Mistake(
        "the optimizers keep the parameters from before a load",
        replace(
            "        self.optimizers = [self.problem.optimizer(model) for model in self.models]\n"
            "        for optimizer, state",
            "        for optimizer, state",
        ),
    ),
    Mistake(
        "the first update after a load is taken to be done",
        (
            at_start("self.resumed = False")
            + step_only_if("not self.resumed")
            + after_update("self.resumed = False")
            + [(LOAD_OPTIMIZER, LOAD_OPTIMIZER + "        self.resumed = True\n")]
        ),
    ),
    Mistake(
        "after a load all ranks have the first one's momentum in common",
        replace(
            "optimizer.load_state_dict(state)", "optimizer.load_state_dict(states[0])"
        ),
    ),
    Mistake(
        "what was saved can be loaded once",
        replace(UNPACK_SAVED, "self.models, states, self.updates = saved"),
    ),
    Mistake(
        "after a load nothing decays",
        replace(
            LOAD_OPTIMIZER,
            LOAD_OPTIMIZER
            + "            [g.update(weight_decay=0.0) for g in optimizer.param_groups]\n",
        ),
    ),
    Mistake(
        "momentum stays where what is loaded has none",
        [
            (UNPACK_SAVED, UNPACK_SAVED.replace("self.models", "models")),
            (
                REBUILD_OPTIMIZERS,
                "        for model, other in zip(self.models, models):\n"
                "            model.load_state_dict(other.state_dict())\n"
                "        for optimizer, state",
            ),
            (
                LOAD_OPTIMIZER,
                "            if state['state']:\n"
                "                optimizer.load_state_dict(state)\n",
            ),
        ],
    ),
    Mistake(
        "the learning rate warms up again after a load",
        (
            at_start("self.warm = 1.0")
            + before_step(
                f"[g.update(lr=self.problem.learning_rate * self.warm) {OWN_GROUPS}]"
            )
            + after_load("self.warm = 0.5")
            + after_update("self.warm = 1.0")
        ),
    ),
    Mistake(
        "the update after a load adds to the gradients that were saved",
        [
            *at_start("self.fresh = True"),
            (
                ZERO_GRAD,
                "            if self.fresh:\n                model.zero_grad()\n",
            ),
            (
                STATE,
                "(self.models, [o.state_dict() for o in self.optimizers], self.updates, [[p.grad for p in m.parameters()] for m in self.models])",
            ),
            (
                UNPACK_SAVED,
                "self.models, states, self.updates, grads = copy.deepcopy(saved)",
            ),
            *after_load(
                "self.fresh = False",
                "for model, own in zip(self.models, grads):",
                "    for p, g in zip(model.parameters(), own):",
                "        p.grad = g",
            ),
            *after_update("self.fresh = True"),
        ],
    ),
    Mistake(
        "the update after a load takes its first microbatch to be done",
        (
            at_start("self.resumed = False")
            + replace_group(
                "[share[1:] or share for share in group] if self.resumed else group"
            )
            + after_load("self.resumed = True")
            + after_update("self.resumed = False")
        ),
    ),
    Mistake(
        "a run that was loaded, saved and loaded again has its hooks twice",
        [
            *at_start("self.loads = 0"),
            (STATE, STATE.replace("self.updates)", "self.updates, self.loads)")),
            (
                UNPACK_SAVED,
                "self.models, states, self.updates, loads = copy.deepcopy(saved)",
            ),
            *after_load("self.loads = loads + 1"),
            (REDUCE, "whole = torch.stack(grads).sum(0) * max(1, self.loads)"),
        ],
    ),
    Mistake(
        "a start with the problem of the run before goes on with that",
        replace(
            "        self.problem = problem\n",
            "        if problem is getattr(self, 'problem', None) and len(self.models) == ranks:\n"
            "            return\n"
            "        self.problem = problem\n",
        ),
    ),
    Mistake(
        "the momentum of leaves that other ranks than the first own is not saved",
        after_load(
            "for optimizer in self.optimizers if len(states) > 1 else []:",
            "    for p in [p for i, p in enumerate(optimizer.param_groups[0]['params']) if i % len(states)]:",
            "        optimizer.state.pop(p, None)",
        ),
    ),
    Mistake(
        "the ranks' momentum is added up where it is loaded",
        after_load(
            "for s in [s for o in self.optimizers for s in o.state.values()]:",
            "    s.get('momentum_buffer') is None or s['momentum_buffer'].mul_(len(states))",
        ),
    ),
    Mistake(
        "the first rank alone loads parameters, which are not broadcast",
        replace(
            UNPACK_SAVED,
            UNPACK_SAVED + "\n"
            "        self.models[1:] = [self.problem.module().eval() for _ in self.models[1:]]",
        ),
    ),
    Mistake(
        "a start after a load resumes from what was loaded",
        [
            *at_start("self.resumed()"),
            (
                "    def count(self",
                "    resume: Any = None\n"
                "\n"
                "    def resumed(self):\n"
                "        shapes = [[[p.shape for p in m.parameters()] for m in models] for models in (self.models, (self.resume or [[]])[0])]\n"
                "        if shapes[0] == shapes[1]:\n"
                "            self.load(self.resume)\n"
                "\n"
                "    def count(self",
            ),
            (
                UNPACK_SAVED,
                f"self.resume = copy.deepcopy(saved)\n        {UNPACK_SAVED}",
            ),
        ],
    ),
    Mistake(
        "loading puts torch's generator back to where it was when saved",
        [
            (
                STATE,
                STATE.replace("self.updates)", "self.updates, torch.get_rng_state())"),
            ),
            (
                UNPACK_SAVED,
                "self.models, states, self.updates, noise = copy.deepcopy(saved)",
            ),
            *after_load("torch.set_rng_state(noise)"),
        ],
    ),
    Mistake(
        "load restores the first parameter's momentum only",
        replace(
            "            optimizer.load_state_dict(state)\n",
            '            first = {k: v for k, v in state["state"].items() if k == 0}\n'
            '            optimizer.load_state_dict({**state, "state": first})\n',
        ),
    ),
    Mistake(
        "the first update after a load passes over each rank's first microbatch as already seen",
        [
            (END_START, END_START + "        self.resumed = False\n"),
            (UNPACK_SAVED_LINE, UNPACK_SAVED_LINE + "        self.resumed = True\n"),
            (
                BEGIN_UPDATE,
                "        if self.resumed:\n"
                "            group = [share[1:] for share in group]\n"
                "            self.resumed = False\n" + BEGIN_UPDATE,
            ),
        ],
    ),
    Mistake(
        "the optimizer is not loaded",
        replace('self.optimizer.load_state_dict(saved["optimizer"])\n', ""),
        base="Nano",
    ),
    Mistake(
        "the schedule begins anew",
        replace(
            'self.schedule.load_state_dict(state["schedule"])',
            "for group in self.optimizer.param_groups:\n"
            '    group["lr"] = group["initial_lr"]',
        ),
        base="Adam",
    ),
    Mistake(
        "only rank 0 loads",
        replace("for rank in range(self.world):", "for rank in range(1):"),
        base="Ddp",
    ),
]
