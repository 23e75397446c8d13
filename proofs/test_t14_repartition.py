"""T14, repartition. ``pack``, ``balance``, ``group`` and ``prefetch`` give the update of the order of arrival.

The update depends on the tokens alone, so that how they are put together is free to be chosen for speed.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.spec import spec
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    cases,
    cut,
    cuts,
    gamma,
    real_cases,
    weights_of,
)
from proofs.theorem import System, theorem
from purestep import tree

PAD = {"x": 7, "y": -3, "w": 0}


@st.composite
def example_cases(draw: st.DrawFn) -> tuple[Case, list[Batch]]:
    """A case, and its sequences as examples of uneven length: ignored tokens at their ends are cut off."""
    case = draw(cases(fractional=draw(st.booleans())))
    examples = []
    for row in range(case.rows):
        example = {key: value[row] for key, value in case.batch.items()}
        used = int((example["w"] > 0).nonzero().max()) + 1 if example["w"].any() else 0
        length = draw(st.integers(used, len(example["w"])))
        examples.append({key: value[:length] for key, value in example.items()})
    return case, examples


@theorem(
    "T14", st.tuples(example_cases(), st.integers(0, 12), st.integers(1, 3), st.integers(1, 4))
)
def repartition(system: System, drawn: tuple[tuple[Case, list[Batch]], int, int, int]) -> None:
    """Balanced over ranks and packed within a budget: the state and loss of the big batch, to the bit."""
    (case, examples), slack, multiple_of, ranks = drawn
    longest = max(len(example["w"]) for example in examples)
    budget = max(1, -(-longest // multiple_of) * multiple_of) + slack
    shares = system.balance(examples, ranks)
    assert len(shares) == ranks
    group = [
        microbatch
        for share in shares
        for microbatch in system.pack(share, max_tokens=budget, multiple_of=multiple_of, pad=PAD)
    ]
    assert all(microbatch["w"].numel() <= budget for microbatch in group)
    step = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)
    *state, metrics = step(case.params, case.opt_state, group)
    expected, _, loss = spec(
        models.integer_loss, case.optimizer.update, case.params, case.opt_state, case.batch
    )
    assert_same(tuple(state), expected)
    assert_same(metrics.loss, loss, "loss")
    assert metrics.num_tokens == case.batch["w"].sum()


@st.composite
def stream_cases(draw: st.DrawFn) -> tuple[Case, list[Batch], int, int]:
    """Microbatches one after another; how many make a group; how deep the prefetching goes."""
    case = draw(cases())
    return (
        case,
        cut(case.batch, draw(cuts(case.rows, 6))),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )


@theorem("T14", stream_cases())
def stream(system: System, drawn: tuple[Case, list[Batch], int, int]) -> None:
    """Grouped and prefetched: each group, a short one at the end too, has the gradient of its own tokens."""
    case, parts, k, depth = drawn
    zeros = tree.zeros_like(case.params)
    step = system.make_update_step(models.integer_loss, capture(), weight_fn=weights_of)
    seen = 0
    for group in system.prefetch(system.group(iter(parts), k), "cpu", depth, weight_fn=weights_of):
        _, grads, metrics = step(case.params, zeros, group)
        mine = parts[seen : seen + k]
        whole = {key: torch.cat([part[key] for part in mine]) for key in case.batch}
        num_tokens = whole["w"].sum()
        assert metrics.num_tokens == num_tokens
        if num_tokens > 0:
            _, expected, _ = spec(models.integer_loss, capture().update, case.params, zeros, whole)
            for ours, theirs in zip(*map(tree.leaves_of, (grads, expected)), strict=True):
                # A group's N need not be a power of two: its seeds round once, and what they multiply.
                bound = gamma(8 + whole["w"].numel() * 8, torch.float64) * magnitude(case, whole)
                assert ((ours - theirs).abs() <= bound).all()
        seen += k
    assert seen >= len(parts) > seen - k, "every microbatch is in one group"


def magnitude(case: Case, batch: Batch) -> float:
    """The largest that a sum of absolute values on the way back can be, from the sizes of its factors."""
    hidden = 1 + models.FEATURES * float(batch["x"].abs().max()) * 2 + 2 * 2
    slope = 2 * (models.HIDDEN * hidden * 2 + float(batch["y"].abs().max()))
    return slope * hidden * (1 + models.HIDDEN) * 2


@theorem("T14", st.tuples(real_cases([torch.float64, torch.float32]), st.integers(0, 9)))
def packed_within_bound(system: System, drawn: tuple[RealCase, int]) -> None:
    """For the transformer: packed by length, or several in one row, the exact gradient, but for rounding."""
    case, slack = drawn
    lengths = case.batch["w"].sum(1).tolist()
    examples = [
        {key: case.batch[key][row, :length] for key in ("tokens", "labels")}
        for row, length in enumerate(lengths)
    ]
    zeros = tree.zeros_like(case.params)
    step = system.make_update_step(models.transformer_loss, capture())
    packed = system.pack(examples, max_tokens=max(1, *lengths) + slack)
    documents = ps.pack_documents(examples, row_tokens=models.CONTEXT)
    documents["mask"] = ps.segment_mask(documents["segments"])
    for group in (packed, [documents]):
        _, grads, metrics = step(
            case.params, zeros, [part for part in group if part["labels"].numel()]
        )
        case.assert_within_bound(grads)
        case.assert_loss_within_bound(metrics.loss)


test_repartition = repartition.test()
test_stream = stream.test()
test_packed_within_bound = packed_within_bound.test()
