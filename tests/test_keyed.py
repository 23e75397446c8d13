"""``apply(params, ..., key=keys)``: each dropout of an unmodified module, by hand; what replays, and what is refused."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from tests.families import examples, looking_back, model, with_dropout
from tests.modules import Of, traced
from tests.torch_private import attention_in_steps

KEYS = ps.random.split(ps.random.key(5), 3)
X = torch.randn(
    3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
close = partial(torch.testing.assert_close, rtol=1024 * 2.0**-53, atol=1024 * 2.0**-53)


def keyed(function: Callable[[Tensor], Any]) -> Any:
    """The params, one of value 1, and ``apply`` of a module that is this function."""
    one = nn.Parameter(torch.ones((), dtype=torch.float64))
    return ps.from_module(
        Of(lambda m, x: m.function(m.one * x), one=one, function=function)
    )


def called(function: Callable[[Tensor], Any], x: Tensor = X, key: Any = KEYS) -> Any:
    """What a module of this function gives, with keys."""
    params, apply = keyed(function)
    return apply(params, x, key=key)


def kept(place: int, shape: tuple[int, ...], p: float = 0.5) -> Tensor:
    """What is kept at the n-th place."""
    return ~ps.random.bernoulli(ps.random.fold_in(KEYS, place), p, shape)


DROPPING: list[tuple[Any, tuple[int, ...], int]] = [
    (functional.dropout, (4, 6), 2),
    (lambda x: torch.where(functional.dropout(x) == 2 * x, 2 * x, 0), (4, 6), 2),
    (lambda x: (nn.Dropout(inplace=True)(x), x)[1], (4, 6), 2),
    (lambda x: functional.dropout(x, 0.5, True, True), (4, 6), 2),
    (lambda x: functional.dropout(x, p=0.5, inplace=True), (4, 6), 2),
    (nn.Dropout1d(), (4, 6), 1),
    (functional.dropout2d, (4, 2, 3), 1),
    (functional.dropout3d, (4, 1, 2, 3), 1),
]


@pytest.mark.parametrize(("function", "shape", "dimensions"), DROPPING)
def test_elements_and_channels(
    function: Any, shape: tuple[int, ...], dimensions: int, fresh_compiler: None
) -> None:
    """At each place, by other numbers; compiled, too."""
    x, own = X.view(3, *shape), shape[:dimensions]
    params, apply = keyed(lambda x: [function(x + 0) for _ in range(2)])
    results = apply(params, x, key=KEYS)
    if function in (DROPPING[1][0], functional.dropout2d):
        assert all(map(torch.equal, traced(apply)(params, x, key=KEYS), results))
    for place, made in enumerate(results):
        own_kept = kept(place, own).view(3, *own, *[1] * (len(shape) - dimensions))
        assert torch.equal(made, torch.where(own_kept, 2 * x, 0))


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_alpha_dropout_is_torchs(p: float) -> None:
    """What is dropped falls to where ``selu`` ends, and then all is brought back to mean and deviation, as torch does it."""
    alpha = 1.7580993408473766
    a = 0.0 if p == 1 else ((alpha**2 * p + 1) * (1 - p)) ** -0.5
    alphas: Any = (
        (functional.alpha_dropout, (4, 6)),
        (functional.feature_alpha_dropout, (4,)),
    )
    for function, shape in alphas:
        made = called(partial(function, p=p, training=True))
        noise = kept(0, shape, p).to(X.dtype).view(3, *shape, *[1] * (2 - len(shape)))
        close(made, X * noise * a + ((noise - 1) * alpha * a + alpha * a * p))


def test_what_does_not_train_is_not_drawn() -> None:
    """Neither in evaluation nor at a rate of 0; such a call is no place. Without keys nothing has changed."""

    def function(x: Tensor) -> Tensor:
        x = functional.alpha_dropout(functional.dropout(x, 0.5, training=False), 0.5)
        x = functional.rrelu(functional.dropout(x, 0.0) + 9) - 9
        return functional.dropout(x)

    close(called(function), torch.where(kept(0, (4, 6)), 2 * X, 0))
    params, apply = keyed(lambda x: functional.alpha_dropout(x, 0.5))
    assert torch.equal(traced(apply)(params, X, key=KEYS), X)
    module = nn.Sequential(nn.Linear(6, 2).double(), nn.Dropout())
    params, apply = ps.from_module(module)
    assert torch.equal(apply.eval(params, X, key=KEYS), apply.eval(params, X))
    torch.manual_seed(3)
    made = apply(params, X)
    torch.manual_seed(3)
    assert torch.equal(made, module(X))


CLOSED = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [True] * 4])


attend = functional.scaled_dot_product_attention
ADDED = torch.randn(3, 1, 4, 4, dtype=torch.float64)
ATTENTION: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": 3.0},
    {"attn_mask": CLOSED},
]


@pytest.mark.parametrize(
    "settings", [*ATTENTION, {"attn_mask": ADDED}, {"enable_gqa": True}]
)
def test_attention(settings: dict[str, Any]) -> None:
    """torch's own weights, of which elements are dropped; a query that attends to nothing gets zeros, and no NaN comes back."""
    x = X.view(3, 1, 4, 6).repeat(1, 4, 1, 1) + torch.arange(4).view(4, 1, 1)
    heads = 2 if "enable_gqa" in settings else 4
    # Each value a unit vector: what comes out are the weights.
    units = torch.eye(4, dtype=torch.float64).expand(3, heads, 4, 4)

    def function(x: Tensor, p: float = 0.5) -> Tensor:
        query, key = x[..., :3], x[:, :heads, :, 3:]
        return attend(query, key, units, dropout_p=p, **settings)

    weights = torch.where(kept(0, (4, 4, 4)), 2 * function(x, 0.0), 0)
    assert not weights.isnan().any()
    close(called(function, x), weights)
    params, apply = keyed(function)
    grads = torch.func.grad(lambda p: apply(p, x, key=KEYS).square().sum())(params)
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(need_weights: bool, batch_first: bool) -> None:
    """torch's function, whose weights are dropped, with batches where it wants them."""
    layer = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=batch_first).double()
    params, apply = ps.from_module(layer)
    x = X if batch_first else X.transpose(0, 1)

    given: Any = (params, x, x, x)
    how: Any = {"need_weights": need_weights, "key": KEYS}
    made, evaluated = (each(*given, **how)[0] for each in (apply, apply.eval))
    projected = X @ params["in_proj_weight"].T + params["in_proj_bias"]
    query, key, value = projected.view(3, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
    weights = (query @ key.mT / 3**0.5).softmax(-1)
    mixed = (torch.where(kept(0, (2, 4, 4)), 2 * weights, 0) @ value).transpose(1, 2)
    out = mixed.reshape(3, 4, 6) @ params["out_proj.weight"].T + params["out_proj.bias"]
    close(made if batch_first else made.transpose(0, 1), out)
    assert not torch.equal(evaluated, made)


def test_attention_that_drops_nothing_is_torchs() -> None:
    attend = partial(functional.scaled_dot_product_attention, is_causal=True)
    assert torch.equal(
        called(lambda x: attend(x, x.flip(1), x)), attend(X, X.flip(1), X)
    )


class Noisy(nn.Module):
    """Noise in places that may be computed again: in a method, in a module, and one in another."""

    def __init__(self, again: Callable[..., Any] = lambda run, x: run(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.dropout, self.again = nn.Dropout(0.5), again

    def inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.a(x)).tanh()

    def outer(self, x: Tensor) -> Tensor:
        x = self.again(self.inner, x.tanh())
        return functional.dropout(self.b(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.outer, self.dropout(self.a(x)))
        x = self.again(self.dropout, x).tanh()
        return functional.dropout(self.again(self.inner, x))


def by_remat(run: Callable[..., Any], *args: Any) -> Any:
    return ps.remat(run)(*args)


def gradient(apply: Any, params: Any) -> list[Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    return [
        *torch.autograd.grad(
            apply(leaves, X, key=KEYS).square().sum(), [*leaves.values()]
        )
    ]


@pytest.mark.parametrize("again", [partial(checkpoint, use_reentrant=False), by_remat])
def test_what_is_computed_again_draws_the_same(again: Any) -> None:
    """To the bit; nested, and where the function is no module's call. The global generator stays where it is."""
    params, plain = ps.from_module(Noisy())
    _, apply = ps.from_module(Noisy(again))

    def around(params: Any, x: Tensor, key: Tensor) -> Any:
        return again(lambda *given: plain(*given[:2], key=given[2]), params, x, key)

    before = torch.get_rng_state()
    for each in (apply, around):
        assert all(map(torch.equal, gradient(each, params), gradient(plain, params)))
    assert torch.equal(before, torch.get_rng_state())
    if again is by_remat:
        sums = [lambda p, of=of: of(p, X, key=KEYS).sum() for of in (apply, plain)]
        ours, theirs = (torch.func.grad(total)(params).values() for total in sums)
        assert all(map(torch.equal, ours, theirs))


def test_a_checkpoint_that_begins_with_another_is_refused() -> None:
    """Where no tensor by position tells in which of them a place is. Up to torch 2.11 every checkpoint begins by making a tensor, which tells it."""

    def once(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def outer(again: Callable[..., Any], x: Tensor) -> Tensor:
        x = functional.dropout(again(functional.dropout, input=x).tanh())
        return functional.dropout(x.tanh())

    def nested(again: Callable[..., Any], x: Tensor) -> Tensor:
        return again(partial(outer, again), x)

    def drawn(
        function: Callable[..., Tensor], again: Callable[..., Any]
    ) -> list[Tensor]:
        params, apply = keyed(partial(function, again))
        return gradient(apply, params)

    again = partial(checkpoint, use_reentrant=False)
    if torch.__version__ < "2.12":
        assert all(map(torch.equal, drawn(nested, again), drawn(nested, once)))
    else:
        with pytest.raises(
            ValueError, match="with key=, pass tensors to checkpoints by position"
        ):
            drawn(nested, again)
    assert all(map(torch.equal, drawn(outer, again), drawn(outer, once)))
    called(lambda x: again(lambda x: functional.dropout(again(torch.tanh, input=x)), x))


def test_the_same_under_transforms(fresh_compiler: None) -> None:
    """``grad``, and ``vmap`` of one key each. A compiler sees no checkpoint within."""
    params, apply = ps.from_module(Noisy())

    def loss(params: Any, x: Tensor, key: Tensor) -> Tensor:
        return apply(params, x, key=key).square().sum()

    grads = torch.func.grad(loss)(params, X, KEYS)
    assert all(map(torch.equal, grads.values(), gradient(apply, params)))
    per_row = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, X, KEYS)
    close([leaf.sum(0) for leaf in per_row.values()], [*grads.values()])
    params, apply = keyed(
        lambda x: checkpoint(functional.dropout, x, use_reentrant=False)
    )
    with pytest.raises(Exception, match="draws without keys within a checkpoint"):
        traced(apply)(params, X, key=KEYS)


OTHERS = "numpy's or Python's generator has drawn"
WITHOUT_KEYS: list[tuple[str, Any]] = [
    ("rand", lambda x: x + torch.rand(3, 4, 6)),
    ("rand", lambda x: x + torch.rand([], generator=torch.Generator())),
    ("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_()),
    ("normal_", lambda x: x + nn.init.normal_(torch.empty(6))),
    ("multinomial", lambda x: torch.multinomial(x.detach().abs()[0], 2)),
    ("rrelu_with_noise", nn.RReLU()),
    ("exponential_", functional.gumbel_softmax),
    ("native_dropout", lambda x: torch.native_dropout(x, 0.5, True)),
    ("bernoulli_", lambda x: attention_in_steps(x, x, x, None, 0.5)),
    (OTHERS, lambda x: x * random.random()),
    (OTHERS, lambda x: x * numpy.random.rand()),
]


@pytest.mark.parametrize(("name", "function"), WITHOUT_KEYS)
def test_what_no_key_reaches_is_refused_by_name(name: str, function: Any) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}.* (that|which) no key reaches"):
            called(function)


def test_one_number_for_all_rows_is_refused_after_a_call_with_one_row() -> None:
    params, apply = keyed(lambda x: x * torch.rand(1))
    apply(params, X[:1], key=KEYS[:1])
    with pytest.raises(
        ValueError, match=r"^rand draws random numbers that no key reaches"
    ):
        apply(params, X, key=KEYS)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_kernels_are_refused_where_they_drop(kind: Any) -> None:
    for rate in (0.0, 0.5):
        params, apply = ps.from_module(
            kind(6, 6, 2, dropout=rate, batch_first=True).double()
        )
        expected = apply.eval(params, X)[0]
        assert torch.equal(apply.eval(params, X, key=KEYS)[0], expected)
        refused = pytest.raises(ValueError, match="a recurrent layer with dropout")
        with refused if rate else nullcontext():
            assert torch.equal(apply(params, X, key=KEYS)[0], expected)


def timm(x: Tensor, keep: float) -> Tensor:
    drawn = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * drawn.div_(keep)


def swin(x: Tensor, keep: float) -> Tensor:
    drawn = keep + torch.rand(
        (len(x),) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device
    )
    return x.div(keep) * drawn.floor_()


@pytest.mark.parametrize("path", [timm, swin])
def test_paths_are_dropped_by_example(path: Any, fresh_compiler: None) -> None:
    """As libraries draw them: one number each, of the example's own key, eager, compiled and alone."""
    keys = ps.random.split(ps.random.key(1), 64)
    x = X[:1].expand(64, 4, 6)
    params, apply = keyed(lambda x: path(path(x, 0.75), 0.875))
    made = apply(params, x, key=keys)
    whole = (made != 0).all(2).all(1)
    assert ((made == 0).all(2).all(1) | whole).all()
    assert abs(whole.double().mean() - 0.65625) < 4 * (0.65625 * 0.34375 / 64) ** 0.5
    if path is swin and torch.__version__ < "2.12":
        with pytest.raises(
            Exception, match=r"compiler of torch 2\.11.* hides torch.rand from key="
        ):
            traced(apply)(params, x, key=keys)
    else:
        assert torch.equal(made, traced(apply)(params, x, key=keys))
    assert torch.equal(
        made, torch.cat([apply(params, x[:1], key=key[None]) for key in keys])
    )
    alone = torch.vmap(lambda x, key: apply(params, x[None], key=key)[0])(x, keys)
    assert torch.equal(made, alone)
    with pytest.raises(ValueError, match="random numbers that no key reaches"):
        called(lambda x: path(x[0], 0.5))
    fair = called(lambda x: x.new_ones(3, 1).bernoulli_())
    assert torch.equal(fair, called(lambda x: x.new_ones(3, 1).bernoulli_(0.5)))
    assert torch.equal(
        called(lambda x: torch.rand(3)), called(lambda x: torch.rand(size=(3,)))
    )


def test_tokens_of_all_examples_in_one_dimension() -> None:
    """As OPT has them in its feed-forward layers: it takes keys of tokens."""
    params, apply = keyed(lambda x: functional.dropout(x.flatten(0, 1)).view_as(x))
    with pytest.raises(
        ValueError, match=r"key=ps\.random\.token_keys\(keys\[:, None\], mask, pos"
    ):
        apply(params, X, key=KEYS)
    positions = torch.arange(4).expand(3, 4)
    tokens = ps.random.token_keys(KEYS[:, None], torch.ones_like(positions), positions)
    assert torch.equal(apply(params, X, key=tokens), called(functional.dropout))
    with pytest.raises(ValueError, match="dropout1d drops channels"):
        called(functional.dropout1d, key=tokens)


def test_examples_that_are_not_first_are_refused() -> None:
    """Also where there are as many tokens as rows, and attention takes examples second, as torch's does."""
    for x in (X.transpose(0, 1), X[:1], X[0]):
        with pytest.raises(
            ValueError, match=r"dropout in the module .* first dimension is not"
        ):
            called(functional.dropout, x)
    with pytest.raises(TypeError, match=r"key= takes keys of ps.random.* by position"):
        called(functional.dropout, key=torch.ones(3))
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.5).double()
    second = Of(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)
    for layer.self_attn.dropout in (0.5, 0.0):
        params, apply = ps.from_module(second)
        for x, message in (
            (X[:, :3], "first dimension may be not"),
            (X, "first dimension is not"),
        ):
            with pytest.raises(ValueError, match=message):
                apply(params, x, key=KEYS)
    apply(params, X[:1, :1], key=KEYS[:1])
    called(functional.dropout, X[:, :3])


@pytest.mark.parametrize(
    ("family", "attention"), [("GPT-2", "eager"), ("Llama", "sdpa")]
)
def test_hugging_face_models_draw_the_same_alone_padded_and_packed(
    family: str, attention: str
) -> None:
    """With all dropouts on, to rounding: in float32, in which Llama computes norms."""
    apply: Any
    params, apply = ps.from_module(
        with_dropout(looking_back(model(family, attention)), 0.25)
    )

    def total(m: Any) -> Any:
        key, segments, more = (
            m["key"],
            m.get("segments", m["attention_mask"]),
            {"use_cache": False},
        )
        if "positions" in m:
            key = ps.random.token_keys(key, segments, m["positions"])
            more["position_ids"] = m["positions"]
        mask = ps.segment_mask(segments, torch.float64)
        logits = apply(
            params, m["input_ids"], key=key, attention_mask=mask, **more
        ).logits
        return ps.losses.cross_entropy(logits, m["labels"]).sum()

    texts = ps.random.with_keys(examples(family), ps.random.key(9))
    alone = sum(total(ps.pack([text], max_tokens=10)[0]) for text in texts)
    padded, packed = (
        ps.pack(texts[::-1], max_tokens=24),
        ps.pack_documents(texts, row_tokens=12),
    )
    for group in (padded, [packed]):
        assert abs(sum(map(total, group)) / alone - 1) < 1e-6
    other = ps.random.with_keys(examples(family), ps.random.key(10))
    assert abs(sum(map(total, ps.pack(other, max_tokens=100))) / alone - 1) > 1e-4
