"""Lists the laws of gradient accumulation: each draws two ways to write the same training.

They are the theorems that purestep's own proofs are about, put to a trainer that is a black box.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from purestep.testing.agreement import agree, agree_on_reports
from purestep.testing.case import Case, DisagreementError, Run, outcome
from purestep.testing.draws import Draw
from purestep.testing.history import draw_batch, draw_updates
from purestep.testing.pairs import draw_interrupted, draw_pair
from purestep.testing.problem import Batch
from purestep.testing.trainer import Capabilities, Resumable, Switchable
from purestep.testing.writing import KINDS, draw_problem, next_power_of_two


@dataclass(frozen=True)
class TrainerLaw:
    """States a law about trainers, and draws cases of it.

    Args:
        name: of the theorem.
        title: in a word.
        statement: in a sentence.
        draw_case: draws a case of one of the ``parts`` for a trainer.
        is_able: whether the law can be put to a trainer.
        obstacle: why it cannot be put to one that is not able.
        claim: whether the law holds to the bit in a case; ``DisagreementError`` where it does not
            hold.
        parts: names of the kinds of cases, each of which gets a verdict.
    """

    name: str
    title: str
    statement: str
    draw_case: Callable[[Draw, Any, str], Case]
    is_able: Callable[[Any], bool] = lambda trainer: True
    obstacle: str = ""
    claim: Callable[[Any, Case], bool] = agree
    parts: Sequence[str] = ("",)

    def find_obstacle(self, trainer: Any) -> str:
        """Returns why the law cannot be put to a trainer; an empty text if it can."""
        return "" if self.is_able(trainer) else self.obstacle


def _draw_equation(draw: Draw, trainer: Any, part: str) -> Case:
    capabilities = trainer.capabilities
    earlier = draw_updates(draw, capabilities, range(6))
    last = draw_batch(draw, capabilities, most_rows=8)
    # One microbatch in each update: the cut is T1's.
    acts = [[share[:1] for share in group] for group in earlier]
    acts.append([[last]])
    run = Run(acts, "one microbatch in each update")
    return Case(draw_problem(draw, capabilities), None, run)


def _draw_cut(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "cut", part)


def _draw_ranks(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "ranks")


def _draw_order(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "order")


def _draw_padding(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "padding")


def _draw_weights(draw: Draw, trainer: Any, part: str) -> Case:
    capabilities = trainer.capabilities
    wants_scale = draw.one([False, True])
    if wants_scale and capabilities.weights == "any":
        return _draw_scaled_weights(draw, capabilities)
    return _draw_repeated_tokens(draw, capabilities)


def _draw_scaled_weights(draw: Draw, capabilities: Capabilities) -> Case:
    batch = draw_batch(draw, capabilities)
    scale = draw.one([2.0, 0.5, 4.0, 0.25, 16.0, 0.0625])
    scaled = {**batch, "w": batch["w"] * scale}
    first = Run([[[batch]]], "one microbatch of all rows")
    second = Run([[[scaled]]], f"the weights times {scale}")
    problem = draw_problem(draw, capabilities)
    return Case(problem, first, second, scale=scale)


def _draw_repeated_tokens(draw: Draw, capabilities: Capabilities) -> Case:
    whole_weights = capabilities._replace(weights="whole")
    batch = draw_batch(draw, whole_weights, most_rows=2, most_length=2)
    weights = batch["w"]
    # Once is no change: the first token counts at least twice.
    first_weight = max(1, int(weights[0, 0]))
    weights[0, 0] = first_weight + 1
    if capabilities.is_coarse:
        total = int(weights.sum())
        weights[0, 0] += next_power_of_two(total) - total
    times = weights.flatten()
    repeated: Batch = {}
    for key, x in batch.items():
        tokens = x.flatten(0, 1)
        rows = tokens.repeat_interleave(times, dim=0)
        repeated[key] = rows.unsqueeze(1)  # Each token is a row.
    repeated["w"] = torch.ones_like(repeated["w"])
    first = Run([[[batch]]], "one microbatch of all rows")
    second = Run([[[repeated]]], "each token weight times")
    problem = draw_problem(draw, capabilities)
    return Case(problem, first, second)


def _draw_looks(draw: Draw, trainer: Any, part: str) -> Case:
    can_skip = part != "bits" and trainer.capabilities.skips_nonfinite
    if can_skip and draw.one([False, True]):
        dropout = _draw_dropout(draw, trainer)
        case = draw_interrupted(draw, trainer, dropout=dropout)
        return replace(case, part=part)
    dropout = _draw_dropout(draw, trainer)
    return draw_pair(draw, trainer, "look", part, dropout)


def _draw_dropout(draw: Draw, trainer: Any) -> float:
    if not trainer.capabilities.dropout:
        return 0.0
    return draw.one([0.0, 0.5])


def _draw_identity(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_interrupted(draw, trainer)


def _draw_repartition(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "all")


def _draw_randomness(draw: Draw, trainer: Any, part: str) -> Case:
    return draw_pair(draw, trainer, "all", dropout=0.5)


def _draw_restart(draw: Draw, trainer: Any, part: str) -> Case:
    options: list[Literal["restart", "save"]] = ["restart", "save"]
    act = draw.one(options)
    dropout = _draw_dropout(draw, trainer)
    return draw_interrupted(draw, trainer, act, dropout)


def _draw_settings(draw: Draw, trainer: Any, part: str) -> Case:
    dropout = _draw_dropout(draw, trainer)
    return draw_pair(draw, trainer, "setting", dropout=dropout)


def _check_equation(trainer: Any, case: Case) -> bool:
    """Returns what ``agree`` does, or ``agree_on_reports``; raises what these raise.

    The latter is for an update that is not plain SGD, or in a coarse dtype.
    """
    if trainer.capabilities.is_bounded:
        return agree(trainer, case)
    return agree_on_reports(trainer, case)


def _check_purity(trainer: Any, case: Case) -> bool:
    """Returns True if the purity named by ``case.part`` holds, else raises ``DisagreementError``.

    For "bits" the params of the two runs must end in the same bits, and averages and reports must
    agree up to rounding. For the other parts only the second run is done: on each rank it must
    leave "inputs", its microbatches, or "global state" as they were. Raises ``RefusalError`` if the
    trainer raises.
    """
    if case.part == "bits":
        if not agree(trainer, case):
            raise DisagreementError(
                case, "the same run twice gives different bits", 0.0
            )
        return True
    observations = outcome(trainer, case.problem, case.second)
    for rank, seen in enumerate(observations):
        for part, what in seen.changed:
            if part == case.part:
                text = f"{what} is not as it was on rank {rank}"
                raise DisagreementError(case, text, 1.0)
    return True


def _check_resume(trainer: Any, case: Case) -> bool:
    """Returns what ``agree`` does: whether the two runs end with the same params, to the bit.

    Raises as ``agree`` does. In a coarse dtype it also raises ``DisagreementError`` if the bits
    differ, although the first run has the same bits twice. There a bound of rounding hides what a
    restart loses, as float32 copies of the params.
    """
    if agree(trainer, case):
        return True
    is_coarse = trainer.capabilities.is_coarse
    if is_coarse and case.first and agree(trainer, replace(case, second=case.first)):
        raise DisagreementError(
            case, "a run has the same bits twice, but others if it is resumed", 0.0
        )
    return False


def _computes_cut(trainer: Any) -> bool:
    return not trainer.capabilities.merges_microbatches


def _has_ranks(trainer: Any) -> bool:
    return bool(trainer.capabilities.ranks > 1)


def _has_weights(trainer: Any) -> bool:
    capabilities = trainer.capabilities
    return capabilities.weights != "mask" and not capabilities.task.vocabulary


def _has_dropout(trainer: Any) -> bool:
    return bool(trainer.capabilities.dropout)


def _is_resumable(trainer: Any) -> bool:
    return isinstance(trainer, Resumable)


def _is_switchable(trainer: Any) -> bool:
    return isinstance(trainer, Switchable) and len(trainer.settings) > 1


ALL_LAWS = [
    TrainerLaw(
        name="T0",
        title="equation",
        statement="An update on one microbatch reports Σ wᵢ ℓᵢ / Σ wᵢ; that of plain SGD "
        "is a step by its gradient.",
        draw_case=_draw_equation,
        claim=_check_equation,
    ),
    TrainerLaw(
        name="T1",
        title="cut",
        statement="Any cut of the batch into microbatches gives the update of the one "
        "large batch.",
        draw_case=_draw_cut,
        is_able=_computes_cut,
        obstacle="it joins its microbatches into one",
        parts=KINDS,
    ),
    TrainerLaw(
        name="T2",
        title="ranks",
        statement="Microbatches spread over ranks give every rank the update of one "
        "that holds them all.",
        draw_case=_draw_ranks,
        is_able=_has_ranks,
        obstacle="it runs on one rank",
    ),
    TrainerLaw(
        name="T3",
        title="order",
        statement="Rows, microbatches and ranks may stand in any order.",
        draw_case=_draw_order,
    ),
    TrainerLaw(
        name="T4",
        title="padding",
        statement="Ignored tokens, rows and microbatches change nothing.",
        draw_case=_draw_padding,
    ),
    TrainerLaw(
        name="T5",
        title="weights",
        statement="Scaling all weights changes nothing; a token of weight k counts as "
        "the token k times.",
        draw_case=_draw_weights,
        is_able=_has_weights,
        obstacle="its tokens have no weights",
    ),
    TrainerLaw(
        name="T6",
        title="purity",
        statement="The same start and data give the same bits; data and global state "
        "stay as they were.",
        draw_case=_draw_looks,
        claim=_check_purity,
        parts=("bits", "inputs", "global state"),
    ),
    TrainerLaw(
        name="T7",
        title="identity",
        statement="An update without tokens, or one that is skipped, leaves everything "
        "as it was.",
        draw_case=_draw_identity,
    ),
    TrainerLaw(
        name="T14",
        title="repartition",
        statement="All of these at once: any group of the same rows gives the same "
        "update.",
        draw_case=_draw_repartition,
        is_able=_computes_cut,
        obstacle="it joins its microbatches into one",
    ),
    TrainerLaw(
        name="T15",
        title="randomness",
        statement="Cut, ranks, order and padding change nothing where elements are "
        "dropped, either.",
        draw_case=_draw_randomness,
        is_able=_has_dropout,
        obstacle="its model drops nothing",
    ),
    TrainerLaw(
        name="T16",
        title="resume",
        statement="Saving, starting anew, loading and going on is never having stopped.",
        draw_case=_draw_restart,
        claim=_check_resume,
        is_able=_is_resumable,
        obstacle="it cannot be saved here",
    ),
    TrainerLaw(
        name="T17",
        title="settings",
        statement="Its ways to do one thing agree.",
        draw_case=_draw_settings,
        is_able=_is_switchable,
        obstacle="it has one way",
    ),
]

LAWS = {law.name: law for law in ALL_LAWS}
"""The laws, by their names."""

LAW_NAMES = tuple(LAWS)
"""The names alone, which ``help`` shows as a default."""
