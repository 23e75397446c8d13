"""``apply(params, ..., key=keys)``: each dropout of an unmodified module, by hand; what replays, and what is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import tree
from purestep.testing.bounds import gamma
from tests.families import ROUNDINGS, SHAPE, llama
from tests.torch_private import attention_in_steps

KEYS = ps.random.split(ps.random.key(5), 3)
X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Calls(nn.Module):
    """A module that is one function of its input; one parameter, of value 1."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.function = nn.Parameter(torch.ones((), dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.one * x)


def called(function: Callable[[Tensor], Any], x: Tensor = X, key: Any = KEYS) -> Any:
    """What a module of this function gives, with keys."""
    params, apply = ps.from_module(Calls(function))
    return apply(params, x, key=key)


def kept(place: int, shape: tuple[int, ...], p: float = 0.5) -> Tensor:
    """What is kept at the n-th place."""
    return ~ps.random.bernoulli(ps.random.fold_in(KEYS, place), p, shape)


ALPHA = 1.7580993408473766
ELEMENTS: list[Callable[[Tensor], Tensor]] = [
    functional.dropout,
    nn.Dropout(),
    nn.Dropout(inplace=True),
    lambda x: functional.dropout(x, 0.5, True, True),
    lambda x: functional.dropout(x, p=0.5, inplace=True),
]


@pytest.mark.parametrize("function", ELEMENTS)
def test_elements(function: Callable[[Tensor], Tensor]) -> None:
    made = called(lambda x: function(x + 0))
    assert torch.equal(made, torch.where(kept(0, (4, 6)), 2 * X, 0))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (functional.dropout1d, (4, 6)),
        (nn.Dropout1d(), (4, 6)),
        (functional.dropout2d, (4, 2, 3)),
        (functional.dropout3d, (4, 1, 2, 3)),
    ],
)
def test_channels(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    x = X.view(3, *shape)
    of_channel = kept(0, (4,)).view(3, 4, *[1] * (len(shape) - 1))
    assert torch.equal(called(function, x), torch.where(of_channel, 2 * x, 0))


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_alpha_dropout_is_torchs(p: float) -> None:
    """What is dropped falls to where ``selu`` ends, and then all is brought back to mean and deviation, as torch does it."""
    a = 0.0 if p == 1 else ((ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    for function, shape in (
        (functional.alpha_dropout, (4, 6)),
        (functional.feature_alpha_dropout, (4,)),
    ):
        made = called(lambda x, f=function: f(x, p, True))  # type: ignore[misc]
        noise = kept(0, shape, p).to(X.dtype).view(3, *shape, *[1] * (2 - len(shape)))
        expected = X * noise * a + ((noise - 1) * ALPHA * a + ALPHA * a * p)
        torch.testing.assert_close(made, expected, rtol=8 * 2.0**-53, atol=8 * 2.0**-53)


def test_what_does_not_train_is_not_drawn() -> None:
    """Neither in evaluation nor at a rate of 0; such a call is no place."""

    def function(x: Tensor) -> Tensor:
        x = functional.alpha_dropout(functional.dropout(x, 0.5, training=False), 0.5)
        x = functional.rrelu(functional.dropout(x, 0.0) + 9) - 9
        return functional.dropout(x)

    torch.testing.assert_close(
        called(function), torch.where(kept(0, (4, 6)), 2 * X, 0), rtol=0, atol=64 * 2.0**-52
    )
    torch.compiler.reset()
    params, apply = ps.from_module(Calls(lambda x: functional.alpha_dropout(x, 0.5)))
    compiled = torch.compile(lambda x: apply(params, x, key=KEYS), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X)
    params, apply = ps.from_module(nn.Sequential(nn.Linear(6, 2).double(), nn.Dropout()))
    assert torch.equal(apply.eval(params, X, key=KEYS), apply.eval(params, X))


def test_places_are_counted() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [functional.dropout(x) for _ in range(40)]

    for place, made in enumerate(called(function)):
        assert torch.equal(made, torch.where(kept(place, (4, 6)), 2 * X, 0))


CLOSED = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [True] * 4])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True},
        {"scale": 3.0},
        {"attn_mask": CLOSED},
        {"attn_mask": torch.randn(3, 1, 4, 4, dtype=torch.float64)},
    ],
)
def test_attention(given: dict[str, Any]) -> None:
    """torch's own weights, of which elements are dropped; a query that attends to nothing gets zeros, and no NaN comes back."""
    x = X.view(3, 1, 4, 6).repeat(1, 2, 1, 1) + torch.arange(2).view(2, 1, 1)
    # Each value a unit vector: what comes out are the weights.
    units = torch.eye(4, dtype=torch.float64).expand(3, 2, 4, 4)

    def function(x: Tensor, p: float) -> Tensor:
        return functional.scaled_dot_product_attention(
            x[..., :3], x[..., 3:], units, dropout_p=p, **given
        )

    weights = function(x, 0.0)
    made = called(lambda x: function(x, 0.5), x)
    expected = torch.where(kept(0, (2, 4, 4)), 2 * weights, 0)
    assert not expected.isnan().any()
    torch.testing.assert_close(made, expected, rtol=64 * 2.0**-53, atol=64 * 2.0**-53)
    params, apply = ps.from_module(Calls(lambda x: function(x, 0.5)))
    grads = torch.func.grad(lambda p: apply(p, x, key=KEYS).square().sum())(params)
    assert all(grad.isfinite().all() for grad in grads.values())


def test_grouped_queries() -> None:
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    fewer = x[:, ::2]

    def function(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            x, x[:, ::2], x[:, ::2], dropout_p=0.5, enable_gqa=True
        )

    def spread(x: Tensor) -> Tensor:
        twice = x[:, ::2].repeat_interleave(2, 1)
        return functional.scaled_dot_product_attention(x, twice, twice, dropout_p=0.5)

    assert fewer.shape[1] == 2
    assert torch.equal(called(function, x), called(spread, x))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(need_weights: bool, batch_first: bool) -> None:
    """torch's function, whose weights are dropped, with batches where it wants them."""
    layer = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=batch_first).double()
    params, apply = ps.from_module(layer)
    x = X if batch_first else X.transpose(0, 1)

    def of(apply: Any, **given: Any) -> Tensor:
        made: Tensor = apply(params, x, x, x, need_weights=need_weights, **given)[0]
        return made if batch_first else made.transpose(0, 1)

    made = of(apply, key=KEYS)
    query, key, value = (X @ params["in_proj_weight"].T + params["in_proj_bias"]).view(3, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)  # fmt: skip
    weights = (query @ key.mT / 3**0.5).softmax(-1)
    mixed = torch.where(kept(0, (2, 4, 4)), 2 * weights, 0) @ value
    expected = (
        mixed.transpose(1, 2).reshape(3, 4, 6) @ params["out_proj.weight"].T
        + params["out_proj.bias"]
    )
    torch.testing.assert_close(made, expected, rtol=256 * 2.0**-53, atol=256 * 2.0**-53)
    assert not torch.equal(of(apply.eval, key=KEYS), made)


class Noisy(nn.Module):
    """Noise in places that checkpoints compute again: in a method, in a module, and one in another."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.dropout, self.again = nn.Dropout(0.5), again

    def inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.a(x)).tanh()

    def outer(self, x: Tensor) -> Tensor:
        x = self.run(self.inner, x.tanh())
        return functional.dropout(self.b(x)).tanh()

    def run(self, function: Callable[..., Any], x: Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=False) if self.again else function(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.a(x))
        x = self.run(self.outer, x)
        x = self.run(self.dropout, x).tanh()
        made: Tensor = functional.dropout(self.run(self.inner, x))
        return made


def gradient(apply: Any, params: Any, key: Any = KEYS) -> list[Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    return [*torch.autograd.grad(apply(leaves, X, key=key).square().sum(), [*leaves.values()])]


def test_checkpoints_draw_the_same_again() -> None:
    """To the bit; nested, and where the function is no module's call. The global generator stays where it is."""
    module = Noisy(True)
    params, again = ps.from_module(module)
    module.again = False
    _, plain = ps.from_module(module)
    before = torch.get_rng_state()
    for one, other in zip(gradient(again, params), gradient(plain, params), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_remat_draws_the_same_again() -> None:
    """Around ``apply``, and within the module."""
    params, plain = ps.from_module(Noisy(False))

    def around(params: Any, x: Tensor, key: Tensor) -> Any:
        return ps.remat(lambda p, x, k: plain(p, x, key=k))(params, x, key)

    def within(x: Tensor) -> Tensor:
        made: Tensor = ps.remat(lambda x: functional.dropout(functional.dropout(x).tanh()))(x)
        return functional.dropout(made)

    for one, other in zip(gradient(around, params), gradient(plain, params), strict=True):  # fmt: skip
        assert torch.equal(one, other)

    def plainly(x: Tensor) -> Tensor:
        return functional.dropout(functional.dropout(functional.dropout(x).tanh()))

    inside, by_hand = (
        torch.autograd.grad(called(function, x).square().sum(), x)[0]
        for x in [X.clone().requires_grad_()]
        for function in (within, plainly)
    )
    assert torch.equal(inside, by_hand)
    params, apply = ps.from_module(Calls(within))
    _, once = ps.from_module(Calls(plainly))
    slopes = [
        torch.func.grad(lambda x, of=of: of(params, x, key=KEYS).sum())(X) for of in (apply, once)
    ]
    assert torch.equal(*slopes)


def test_the_same_under_transforms() -> None:
    """``grad``, ``vmap`` of one key each, and both."""
    params, apply = ps.from_module(Noisy(False))

    def loss(params: Any, x: Tensor, key: Tensor) -> Tensor:
        made: Tensor = apply(params, x, key=key).square().sum()
        return made

    grads = torch.func.grad(loss)(params, X, KEYS)
    for one, other in zip(grads.values(), gradient(apply, params), strict=True):
        assert torch.equal(one, other)
    together = apply(params, X, key=KEYS)
    each = torch.vmap(lambda x, key: apply(params, x, key=key))(X, KEYS)
    alone = torch.cat([apply(params, X[i : i + 1], key=KEYS[i : i + 1]) for i in range(3)])
    for other in (each, alone):
        assert torch.equal(other == 0, together == 0)
        torch.testing.assert_close(other, together, rtol=256 * 2.0**-53, atol=256 * 2.0**-53)
    per_row = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, X, KEYS)
    torch.testing.assert_close(
        [leaf.sum(0) for leaf in per_row.values()], [*grads.values()], rtol=1024 * 2.0**-53, atol=1024 * 2.0**-53
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "compiler"), [(Noisy(False), partial(ps.compile, backend="aot_eager")), (Calls(nn.Dropout()), True)]
)  # fmt: skip
def test_the_same_compiled(module: nn.Module, compiler: Any) -> None:
    """In one graph, forward and backward: of many places as traced, of one in the compiler's kernels."""
    params, apply = ps.from_module(module)

    def loss(params: Any, m: Any) -> Tensor:
        made: Tensor = apply(params, m["x"], key=m["key"]).square().sum(-1)
        return made

    def of(**how: Any) -> Any:
        step = ps.make_update_step(
            loss, ps.optim.sgd(1.0), weight_fn=lambda m: torch.ones(m["x"].shape[:2]), **how
        )
        return step(params, ps.optim.sgd(1.0).init(params), [{"x": X, "key": KEYS}])[0]

    plain, compiled = of(), of(compile=compiler)
    for name in plain:
        torch.testing.assert_close(plain[name], compiled[name], rtol=0, atol=1024 * 2.0**-53)
        assert not torch.equal(plain[name], params[name])


def test_checkpoints_within_are_not_compiled() -> None:
    torch.compiler.reset()
    params, apply = ps.from_module(Noisy(True))
    compiled = torch.compile(lambda x: apply(params, x, key=KEYS), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="draws without keys within a checkpoint"):
        compiled(X)


def test_threads_have_keys_of_their_own() -> None:
    params, apply = ps.from_module(Noisy(False))
    made: dict[int, Tensor] = {}

    def run(i: int) -> None:
        for _ in range(20):
            made[i] = apply(params, X[i : i + 1], key=KEYS[i : i + 1])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        assert torch.equal(made[i], apply(params, X[i : i + 1], key=KEYS[i : i + 1]))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rand", lambda x: x + torch.rand(3, 4, 6)),
        ("rand_like", lambda x: x + torch.rand_like(x)),
        ("rand", lambda x: x + torch.rand([], generator=torch.Generator())),
        ("bernoulli", lambda x: x * torch.bernoulli(x.detach().sigmoid())),
        ("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_()),
        ("normal_", lambda x: x + nn.init.normal_(torch.empty(6))),
        ("multinomial", lambda x: torch.multinomial(x.detach().abs()[0], 2)),
        ("rrelu_with_noise", nn.RReLU()),
        ("exponential_", functional.gumbel_softmax),
        ("native_dropout", lambda x: torch.native_dropout(x, 0.5, True)),
        ("bernoulli_", lambda x: torch.dropout(x, 0.5, True)),
        ("rand", lambda x: functional.fractional_max_pool2d(x, 2, (2, 2))),
        ("bernoulli", lambda x: torch.ops.aten.bernoulli(x.detach().sigmoid())),
        ("bernoulli", lambda x: torch.ops.aten.bernoulli.default(x.detach().sigmoid())),
        ("bernoulli_", lambda x: attention_in_steps(x, x, x, None, 0.5)),
    ],
)
def test_what_no_key_reaches_is_refused_by_name(name: str, function: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}.* draws random numbers that no key reaches"):
        called(function)


@pytest.mark.parametrize("draw", [random.random, lambda: numpy.random.rand()])
def test_numbers_of_numpy_and_python_are_refused(draw: Callable[[], float]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="numpy's or Python's generator has drawn"):
            called(lambda x: x * draw())


def timm(x: Tensor, keep: float) -> Tensor:
    drawn = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * drawn.div_(keep)


def torchvision(x: Tensor, keep: float) -> Tensor:
    noise = torch.empty([len(x)] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(keep).div_(keep)


def swin(x: Tensor, keep: float) -> Tensor:
    drawn = keep + torch.rand((len(x),) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x.div(keep) * drawn.floor_()


@pytest.mark.parametrize("path", [timm, torchvision, swin])
def test_paths_are_dropped_by_example(path: Callable[[Tensor, float], Tensor]) -> None:
    """As libraries draw them: one number each, of the example's own key, eager, compiled and alone."""
    torch.compiler.reset()
    keys = ps.random.split(ps.random.key(1), 64)
    x = X[:1].expand(64, 4, 6)
    params, apply = ps.from_module(Calls(lambda x: path(path(x, 0.5), 0.75)))
    made = apply(params, x, key=keys)
    share = (made != 0).all(2).all(1).double().mean()
    assert ((made == 0).all(2).all(1) | (made != 0).all(2).all(1)).all()
    assert abs(share - 0.375) < 4 * (0.375 * 0.625 / 64) ** 0.5
    alone = torch.cat([apply(params, x[:1], key=key[None]) for key in keys])
    compiled = torch.compile(lambda x, k: apply(params, x, key=k), backend="eager", fullgraph=True)
    others = [alone, compiled(x, keys)]
    if path is not torchvision:  # vmap knows no writes of many numbers into one
        others.append(torch.vmap(lambda x, key: apply(params, x[None], key=key)[0])(x, keys))
    for other in others:
        assert torch.equal(made, other)
    with pytest.raises(ValueError, match="random numbers that no key reaches"):
        called(lambda x: path(x[0], 0.5))


class Second(nn.Module):
    """Takes examples along the second dimension, as torch's encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.5).double()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def test_rows_and_tokens_of_one_number() -> None:
    """Where attention may take examples along the second dimension, as torch's does by default."""
    torch.compiler.reset()
    square = X[:, :3]
    params, apply = ps.from_module(Second())
    for x, message in (
        (square, "first dimension may be not that"),
        (X, "first dimension is not that"),
    ):
        for f in (apply, torch.compile(apply, backend="eager")):
            with pytest.raises(ValueError, match=message):
                f(params, x, key=KEYS)
    expected = torch.where(kept(0, (3, 6)), 2 * square, 0)
    assert torch.equal(called(functional.dropout, square), expected)


def test_tokens_of_all_examples_in_one_dimension() -> None:
    """OPT has them so in its feed-forward layers: it takes keys of tokens."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.25,
    )  # fmt: skip
    params, apply = ps.from_module(transformers.OPTForCausalLM(config).double().train())
    ids = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(0))

    def logits(ids: Tensor, key: Any) -> Tensor:
        made: Tensor = apply(params, ids, use_cache=False, key=key).logits
        return made

    with pytest.raises(
        ValueError, match=r"key=ps\.random\.token_keys\(keys\[:, None\], mask, positions\)"
    ):
        logits(ids, KEYS)
    mask, positions = torch.ones_like(ids), torch.arange(7).expand(3, 7)
    tokens = ps.random.token_keys(KEYS[:, None], mask, positions)
    together = logits(ids, tokens)
    for row in range(3):
        own = ps.random.TokenKeys(tokens.keys[row : row + 1], positions[:1])
        torch.testing.assert_close(logits(ids[row : row + 1], own)[0], together[row])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_kernels_are_refused_where_they_drop(kind: Any) -> None:
    for rate in (0.5, 0.0):
        params, apply = ps.from_module(kind(6, 6, 2, dropout=rate, batch_first=True).double())
        assert apply.eval(params, X, key=KEYS)[0].shape == X.shape
        if rate == 0:
            assert torch.equal(apply(params, X, key=KEYS)[0], apply(params, X)[0])
        else:
            with pytest.raises(ValueError, match="a recurrent layer with dropout"):
                apply(params, X, key=KEYS)


def test_examples_that_are_not_first_are_refused() -> None:
    for x in (X.transpose(0, 1), X[:1], X[0]):
        with pytest.raises(
            ValueError, match=r"dropout in the module .* first dimension is not that"
        ):
            called(functional.dropout, x)
    with pytest.raises(TypeError, match=r"key= takes keys of ps.random.* by position"):
        called(functional.dropout, key=torch.ones(3))
    packed = ps.random.TokenKeys(KEYS[:, None].expand(3, 4), torch.arange(4).expand(3, 4))
    with pytest.raises(ValueError, match="dropout1d drops channels"):
        called(functional.dropout1d, key=packed)


def test_without_keys_nothing_has_changed() -> None:
    module = nn.Sequential(nn.Linear(6, 6).double(), nn.Dropout())
    params, apply = ps.from_module(module)
    torch.manual_seed(3)
    made = apply(params, X)
    torch.manual_seed(3)
    assert torch.equal(made, module(X))


def gpt2(implementation: str) -> Any:
    rates = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.25)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **rates))
    model.set_attn_implementation(implementation)
    return model.double().train()


def llama_with_dropout(implementation: str) -> Any:
    model = llama(attn_implementation=implementation).double().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    return model


LENGTHS = [7, 3, 5, 2, 6]


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": (ids := torch.randint(64, (n,), generator=generator)),
            "labels": torch.cat([ids[1:], torch.tensor([-100])]),
            "attention_mask": torch.ones_like(ids),
        }
        for n in LENGTHS
    ]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [gpt2, llama_with_dropout])
def test_hugging_face_models_train_the_same_whatever_the_cut(
    make: Callable[[str], Any], implementation: str
) -> None:
    """With all dropouts on: padded batches of any size and order, and several texts in one row, to rounding."""
    torch.manual_seed(0)
    model = make(implementation)
    params, apply = ps.from_module(model)
    examples = ps.random.with_keys(texts(), ps.random.key(9))

    def loss_fn(params: Any, m: Any) -> Tensor:
        positions, key = m.get("positions"), m["key"]
        mask = ps.segment_mask(m.get("segments", m["attention_mask"]), torch.float64)
        if positions is None:
            positions = torch.arange(m["labels"].shape[1]).expand(m["labels"].shape)
        else:
            key = ps.random.token_keys(key, m["segments"], positions)
        logits = apply(
            params, m["input_ids"], attention_mask=mask, position_ids=positions, use_cache=False, key=key
        ).logits  # fmt: skip
        return ps.losses.cross_entropy(logits, m["labels"])

    def gradients(group: list[Any]) -> list[Tensor]:
        sums = ps.accumulate(loss_fn, params, group)
        return [leaf.clone() for leaf in tree.leaves_of(sums.grads)]

    groups = [
        ps.pack(examples, max_tokens=100),
        ps.pack(examples[::-1], max_tokens=8, multiple_of=2),
        ps.pack(examples, max_tokens=16, multiple_of=8),
        [ps.pack_documents(examples, row_tokens=9)],
    ]
    one, *others = map(gradients, groups)
    alone = [gradients([m]) for m in ps.pack(examples, max_tokens=7)]
    for other in others:
        for a, b, *terms in zip(one, other, *alone, strict=True):
            scale = torch.stack(terms).flatten(1).norm(dim=1).sum()
            # Llama computes norms and softmax in float32 whatever its dtype is.
            unit = torch.float32 if make is llama_with_dropout else torch.float64
            assert (a - b).norm() <= 2 * gamma(ROUNDINGS, unit) * scale
    examples = ps.random.with_keys(texts(), ps.random.key(10))
    assert not torch.equal(gradients(ps.pack(examples, max_tokens=100))[0], one[0])
