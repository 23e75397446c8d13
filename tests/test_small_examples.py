"""Tests the claims of the small examples, with fewer steps than their pictures have."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples import (
    cut_invariance,
    differential_privacy,
    ensembles,
    hypergradients,
    maml,
    noise_scale,
)
from purestep.testing.bounds import rounding_bound


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    """Names the picture, and checks that it has been drawn in the end."""
    picture = tmp_path / "picture.png"
    yield ["--picture", str(picture)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def add_rounding(grad: Tensor) -> Tensor:
    """Moves each element, up or down, by what rounding a sum of 2,000 terms may do to the largest."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, grad.shape, generator=generator) * 2 - 1
    bound = rounding_bound(2000, grad.dtype) * grad.abs().max()
    return grad + bound * signs


def add_rounding_to_all(grads: Any, state: Any, params: Any) -> Any:
    return tree.map(add_rounding, grads), state


ROUNDED = ps.optim.chain(
    ps.optim.Transform(lambda params: (), add_rounding_to_all),
    cut_invariance.OPTIMIZER,
)


def bounds(dtype: torch.dtype, steps: int) -> list[float]:
    """Computes how far rounding of the gradients' sums takes a run on one rank from itself."""
    cut = cut_invariance.CUTS["one large microbatch"]
    model = cut_invariance.make_gpt2(dtype)
    data = cut_invariance.sample_groups(steps)
    for group in data:
        assert sum(len(microbatch["tokens"]) for microbatch in group) <= 2000

    axis = ps.testing.ThreadAxis(1)

    def program(_: int) -> list[Any]:
        return [
            cut_invariance.train(axis, model, cut, data, optimizer)
            for optimizer in (cut_invariance.OPTIMIZER, ROUNDED)
        ]

    (runs,) = axis.map(program)([0])
    return cut_invariance.measure_distances(runs)


def test_cuts_are_one_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lie no farther apart than rounding explains, where those of the usual loop do."""
    monkeypatch.setattr(cut_invariance, "GROUP", 2)
    monkeypatch.delitem(cut_invariance.CUTS, "in order of arrival, fours")
    distances = cut_invariance.main(["--steps", "1", *arguments])
    of_the_usual_loop = distances["the usual loop, float64"][-1]
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        ours = distances[f"purestep, {name}"]
        for distance, bound in zip(ours, bounds(dtype, 1), strict=True):
            assert 0 < distance < bound < of_the_usual_loop


def test_an_ensemble_is_its_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with runs whose learning rates are off by γₙ.

    To its end where training is stable, which is the lower half.
    """
    monkeypatch.setattr(ensembles, "RUNS", 40)
    curves = ensembles.main(["--steps", "24", *arguments])
    stable = slice(ensembles.RUNS // 2)
    alone = curves.alone[stable]
    together = curves.together[stable]
    factor = rounding_bound(4 * ensembles.POINTS, torch.float64)
    rates = curves.rates[stable] * (1 + factor)
    with_other_rates = ensembles.train_one_by_one(rates, 24)
    bound = factor * alone + (with_other_rates - alone).abs()
    assert ((together - alone).abs() <= bound).all()
    assert not torch.equal(curves.alone[0], curves.alone[1])

    last = curves.together[:, -1]
    assert 2 * last.min() < torch.minimum(last[0], last[-1])


def assert_positive(gain: Tensor) -> None:
    """Checks that the mean of a sample is positive by five standard errors."""
    assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5


def test_learned_rates_serve_others(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beat the best single rate on unseen runs."""
    monkeypatch.setattr(hypergradients, "UPDATES", 3)
    single, learned = hypergradients.main(["--steps", "16", *arguments])
    assert_positive((single - learned)[:, -1])


def test_what_is_learned_adapts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapts in a few updates, which ordinary training does not at any rate."""
    monkeypatch.setattr(maml, "MAX_UPDATES", 2)
    results = maml.main(["--steps", "80", *arguments])
    plain, learned = (losses.mean(-1) for losses in results)
    adapted = learned[:, maml.UPDATES]
    assert_positive(learned[:, 0] - adapted)
    assert_positive(plain[:, maml.UPDATES] - adapted)
    assert adapted.mean() < 0.75 * plain.mean(0).min()


def test_an_example_is_hidden_by_noise_and_by_others(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise costs accuracy, and the same noise less of it among four times as many.

    By ten deviations of 4000 answers. Two cuts are one run, noise included, but for rounding.
    """
    monkeypatch.setattr(differential_privacy, "SEEDS", 1)
    monkeypatch.setattr(differential_privacy, "NOISES", (0.0, 12.0, 48.0))
    curves = differential_privacy.main(["--steps", "4", *arguments])
    few, more, most = curves.values()
    output = capsys.readouterr().out
    (distance,) = re.findall(r"or 12, with noise: (\S+) of", output)
    assert float(distance) < rounding_bound(1200, torch.float32)
    ten_deviations = 10 * (2 * 0.25 / 4000) ** 0.5
    assert min(few[0], more[1]) > few[1] + ten_deviations
    assert most[2] > more[2] + ten_deviations


def test_microbatches_tell_the_noise_scale_of_all_examples(
    arguments: list[str],
) -> None:
    """Estimates it to a factor of two, while it grows tenfold."""
    results = noise_scale.main(["--steps", "144", *arguments])
    for _, estimate, expected in results:
        assert expected / 2 < estimate < 2 * expected
    _, first, _ = results[0]
    _, last, _ = results[-1]
    assert last > 5 * first
