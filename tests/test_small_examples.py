"""The small examples: what each of them claims, with fewer steps than its picture has."""

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
from purestep.testing.bounds import gamma


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    """Where the picture goes, which is drawn in the end."""
    picture = tmp_path / "picture.png"
    yield ["--picture", str(picture)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def off(grad: Tensor) -> Tensor:
    """Off by what rounding of a sum of 2,000 terms may do to its largest element, up or down."""
    signs = (
        torch.randint(2, grad.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    )
    return grad + gamma(2000, grad.dtype) * grad.abs().max() * signs


ROUNDED = ps.optim.chain(
    ps.optim.Transform(lambda params: (), lambda g, s, p: (tree.map(off, g), s)),
    cut_invariance.OPTIMIZER,
)


def bounds(dtype: torch.dtype, steps: int) -> list[float]:
    """How far rounding of the gradients' sums takes a run on one rank from itself."""
    cut, model = cut_invariance.CUTS["one large microbatch"], cut_invariance.gpt2(dtype)
    data, axis = cut_invariance.groups(steps), ps.testing.ThreadAxis(1)
    assert max(sum(len(each["tokens"]) for each in group) for group in data) <= 2000

    def train(optimizer: ps.optim.Optimizer) -> Any:
        return cut_invariance.train(axis, model, cut, data, optimizer)

    (runs,) = axis.map(lambda _: [*map(train, (cut_invariance.OPTIMIZER, ROUNDED))])(
        [0]
    )
    return cut_invariance.worst(runs)


def test_cuts_are_one_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No farther apart than rounding explains, where those of the usual loop are several."""
    monkeypatch.setattr(cut_invariance, "GROUP", 2)
    monkeypatch.delitem(cut_invariance.CUTS, "in order of arrival, fours")
    far = cut_invariance.main(["--steps", "1", *arguments])
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for found, most in zip(far[f"purestep, {name}"], bounds(dtype, 1), strict=True):
            assert 0 < found < most < far["the usual loop, float64"][-1]


def test_an_ensemble_is_its_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far apart as runs whose learning rates are off by γₙ; at the lower half, where training is stable, to its end."""
    monkeypatch.setattr(ensembles, "RUNS", 40)
    found = ensembles.main(["--steps", "24", *arguments])
    stable = slice(ensembles.RUNS // 2)
    factor = gamma(4 * ensembles.POINTS, torch.float64)
    off = ensembles.one_by_one(found.rates[stable] * (1 + factor), 24)
    bound = factor * found.alone[stable] + (off - found.alone[stable]).abs()
    assert ((found.together - found.alone)[stable].abs() <= bound).all()
    assert not torch.equal(found.alone[0], found.alone[1])

    last = found.together[:, -1]
    assert 2 * last.min() < torch.minimum(last[0], last[-1])


def test_learned_rates_serve_others(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On unseen runs they are better than the best single rate by five standard errors."""
    monkeypatch.setattr(hypergradients, "UPDATES", 3)
    gain = torch.sub(*hypergradients.main(["--steps", "16", *arguments]))[:, -1]
    assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5


def test_what_is_learned_adapts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained in the ordinary way does not, with no rate; by five standard errors of the difference."""
    monkeypatch.setattr(maml, "MOST", 2)
    plain, learned = (
        each.mean(-1) for each in maml.main(["--steps", "80", *arguments])
    )
    for gain in (
        learned[:, 0] - learned[:, maml.UPDATES],
        (plain - learned)[:, maml.UPDATES],
    ):
        assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5
    assert learned[:, maml.UPDATES].mean() < 0.75 * plain.mean(0).min()


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
    few, more, most = differential_privacy.main(["--steps", "4", *arguments]).values()
    (apart,) = re.findall(r"or 12, with noise: (\S+) of", capsys.readouterr().out)
    assert float(apart) < gamma(1200, torch.float32)
    ten = 10 * (2 * 0.25 / 4000) ** 0.5
    assert min(few[0], more[1]) > few[1] + ten
    assert most[2] > more[2] + ten


def test_microbatches_tell_the_noise_scale_of_all_examples(
    arguments: list[str],
) -> None:
    """To a factor of two, while it grows tenfold."""
    found = noise_scale.main(["--steps", "144", *arguments])
    _, estimates, expected = zip(*found, strict=True)
    for one, other in zip(estimates, expected, strict=True):
        assert other / 2 < one < 2 * other
    assert estimates[-1] > 5 * estimates[0]
