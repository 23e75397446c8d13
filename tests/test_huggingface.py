"""Models of transformers as they come: a step is ``loss.backward()`` on one big batch, and what README.md says of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from tests.families import (
    FAMILIES,
    ROTARY,
    ROW,
    SETTINGS,
    WINDOW,
    Setting,
    cases,
    examples,
    llama,
    measure,
    model,
    reference,
)
from tests.torch_internals import forward_hooks

pytestmark = [
    # Of torch, for flash attention on a CPU under vmap.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # Of peft, which still asks by the old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

# Two whose masks are made of values otherwise. Inductor takes a minute for each family: benchmarks/families.py has them all.
TRACED = functools.partial(torch.compile, backend="aot_eager")


@pytest.mark.parametrize(
    ("family", "setting"), [case for case in cases() if not SETTINGS[case[1]].compile]
)
def test_a_step_is_one_big_batch(family: str, setting: str) -> None:
    error, bound, same_bits = measure(family, SETTINGS[setting])
    assert error <= bound
    assert same_bits in (True, None)
    assert bound < torch.inf or same_bits


@pytest.mark.parametrize(("family", "form"), [("Llama", "position_ids"), ("BERT", "2D mask")])
def test_compiled_too(family: str, form: Any) -> None:
    error, bound, _ = measure(family, Setting(form, compile=TRACED))
    assert error <= bound


Call = Callable[..., Any]
Inputs = Callable[[dict[str, Tensor]], dict[str, Any]]


def padded(family: str = "Llama") -> list[Any]:
    return ps.pack(examples(family), max_tokens=20)


def packed(family: str = "Llama") -> list[Any]:
    return [ps.pack_documents(examples(family), row_tokens=ROW)]


def off(family: str, group: list[Any], inputs: Inputs, own: nn.Module | None = None) -> float:
    """How far a step's gradient is from that of one big batch."""
    params, apply = ps.from_module(own or model(family))

    def loss_fn(params: Any, m: Any) -> Tensor:
        return ps.losses.cross_entropy(apply(params, **inputs(m)).logits, m["labels"])

    optimizer = ps.optim.sgd(0.1, momentum=0.9)
    _, opt_state, _ = ps.make_update_step(loss_fn, optimizer)(params, optimizer.init(params), group)
    expected = reference(family, "sdpa").grads
    worst = max(
        (opt_state[0].trace[name] - grad).abs().max().item() for name, grad in expected.items()
    )
    return worst / max(grad.abs().max().item() for grad in expected.values())


RIGHT, WRONG = 1e-8, 1e-3
"""Between what rounds in float32 and what is a different gradient."""


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("T5", "BERT")])
def test_a_cache_joins_packed_documents_and_is_refused(family: str) -> None:
    def inputs(m: Any, **more: Any) -> dict[str, Any]:
        return {"input_ids": m["input_ids"], "position_ids": m["positions"], **more}

    with pytest.raises(ValueError, match="use_cache=False"):
        off(family, packed(family), inputs)
    # Asked for, it is given.
    assert off(family, packed(family), functools.partial(inputs, use_cache=True)) > WRONG


class Wrapper(nn.Module):
    """Calls a model in its own way."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.inner, *args)


WAYS: dict[str, Callable[..., Any]] = {
    "by name": lambda own, ids, at, mask, cache: own(
        input_ids=ids, position_ids=at, attention_mask=mask, use_cache=cache
    ),
    "by position": lambda own, ids, at, mask, cache: own(ids, mask, at, use_cache=cache),
    "a tuple": lambda own, ids, at, mask, cache: own(
        ids, mask, at, use_cache=cache, return_dict=False
    ),
    "without the head": lambda own, ids, at, mask, cache: own.model(ids, mask, at, use_cache=cache),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_is_given_by_its_wrapper_is_looked_at(way: str) -> None:
    own = model("Llama")
    for wrapped in (Wrapper(own, WAYS[way]), Wrapper(Wrapper(own, WAYS[way]), lambda m, *a: m(*a))):
        params, apply = ps.from_module(wrapped)
        m = packed()[0]
        ids, at = m["input_ids"], m["positions"]
        for f in (apply, torch.compile(apply, backend="eager")):
            with pytest.raises(ValueError, match="filled a cache"):
                f(params, ids, at, None, None)
            f(params, ids, at, None, False)
    assert forward_hooks(own) == 0


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_bools_by_a_wrapper(way: str) -> None:
    own = model("Llama", "eager")
    params, apply = ps.from_module(Wrapper(own, WAYS[way]))
    m = packed()[0]
    ids, at, mask = m["input_ids"], m["positions"], ps.segment_mask(m["segments"])
    for given in (mask, {"full_attention": mask}):
        with pytest.raises(ValueError, match=r"^attention_mask .* eager attention would add"):
            apply(params, ids, at, given, False)
    apply(params, ids, at, ps.segment_mask(m["segments"], torch.float64), False)


def test_a_cache_that_the_config_leaves_out() -> None:
    own = model("Llama")
    own.config.use_cache = False
    _, apply = ps.from_module(own)
    ids = torch.arange(4)[None]
    assert apply(dict(own.named_parameters()), ids, position_ids=ids).past_key_values is None


def test_without_packed_documents_a_cache_changes_nothing() -> None:
    inputs = ("input_ids", "attention_mask")
    assert off("Llama", padded(), lambda m: {key: m[key] for key in inputs}) < RIGHT


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_2d_mask_joins_packed_documents(family: str) -> None:
    def inputs(m: Any) -> dict[str, Any]:
        given = {"input_ids": m["input_ids"], "attention_mask": m["attention_mask"]}
        return {**given, "position_ids": m["positions"], "use_cache": False}

    assert off(family, packed(family), inputs) > WRONG


def test_positions_do_not_keep_an_encoders_documents_apart() -> None:
    def inputs(m: Any) -> dict[str, Any]:
        return {"input_ids": m["input_ids"], "position_ids": m["positions"]}

    assert off("BERT", packed("BERT"), inputs) > WRONG


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "LoRA on Llama", "BERT", "T5"])
def test_a_mask_of_bools_is_refused_by_eager_attention(family: str) -> None:
    own = model(family, "eager")
    params, apply = ps.from_module(own)
    m = packed(family)[0]
    name = "decoder_attention_mask" if family == "T5" else "attention_mask"
    given = {"input_ids": m["input_ids"], name: ps.segment_mask(m["segments"])}
    if family == "T5":
        given["decoder_input_ids"] = m["decoder_input_ids"]
    with pytest.raises(ValueError, match=f"{name} .* eager attention would add"):
        apply(params, **given)
    # It would have been: other logits than those of the mask to be added.
    added = own(**{**given, name: ps.segment_mask(m["segments"], torch.float64)}).logits
    assert (own(**given).logits - added).abs().max() > WRONG
    # Masks of two dimensions are no such masks, whatever their dtype.
    apply(params, **{**given, name: m["attention_mask"].bool()})


def test_a_4d_mask_brings_its_own_window() -> None:
    def inputs(m: Any, window: int | None) -> dict[str, Any]:
        mask = ps.segment_mask(m["segments"], window=window)
        return {
            "input_ids": m["input_ids"],
            "position_ids": m["positions"],
            "attention_mask": mask,
            "use_cache": False,
        }

    group = packed("Mistral")
    assert off("Mistral", group, functools.partial(inputs, window=WINDOW)) < RIGHT
    assert off("Mistral", group, functools.partial(inputs, window=None)) > WRONG


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_2d_mask_under_vmap_is_refused(family: str) -> None:
    if FAMILIES[family].window:
        return  # A window is in every mask, so that nothing is looked at.
    params, apply = ps.from_module(model(family))
    m = ps.pack(examples(family)[:2], max_tokens=100)[0]
    given = {key: value for key, value in m.items() if key != "labels"}

    def logits(given: Any) -> Tensor:
        batch = {key: value[None] for key, value in given.items()}
        return apply(params, **batch).logits

    with pytest.raises(ValueError, match=r"segment_mask\(attention_mask\)"):
        torch.vmap(logits)(given)


def test_positions_alone_under_vmap_are_refused() -> None:
    params, apply = ps.from_module(model("Llama"))
    m = packed()[0]
    with pytest.raises(ValueError, match="position_ids without a mask"):
        torch.vmap(
            lambda ids, at: apply(params, ids[None], position_ids=at[None], use_cache=False).logits
        )(m["input_ids"], m["positions"])


def test_the_models_own_loss_is_a_mean_of_labels_that_it_shifts() -> None:
    params, apply = ps.from_module(model("Llama"))
    (m,) = ps.pack(examples("Llama"), max_tokens=100)
    optimizer = ps.optim.sgd(0.1)
    for loss_fn, message in (
        (lambda p, m: apply(p, **m).loss, "a scalar is most likely a mean"),
        (lambda p, m: apply(p, **m), "got CausalLMOutputWithPast"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ps.make_update_step(loss_fn, optimizer)(params, optimizer.init(params), [m])
    unshifted = m["input_ids"].masked_fill(m["attention_mask"] == 0, -100)
    logits = apply(params, m["input_ids"], m["attention_mask"]).logits
    losses = ps.losses.cross_entropy(logits, m["labels"])
    mean = losses.sum() / (m["labels"] != -100).sum()

    def own_loss(labels: Tensor) -> Tensor:
        return apply(params, m["input_ids"], m["attention_mask"], labels=labels).loss

    assert own_loss(unshifted).dtype == torch.float32
    # In float32, which rounds logits, their log-sum-exp and each addend.
    assert abs(own_loss(unshifted).item() - mean.item()) < len(losses) * 1e-6
    assert abs(own_loss(m["labels"]).item() - mean.item()) > WRONG
    # The logits are the same, with labels and without.
    assert off("Llama", padded(), lambda m: m) < RIGHT


def test_t5_makes_its_decoders_inputs_from_labels_that_are_not_shifted() -> None:
    inputs = ("input_ids", "attention_mask", "labels")
    assert off("T5", padded("T5"), lambda m: {key: m[key] for key in inputs}) < RIGHT


def test_sources_and_targets_are_padded_to_one_length() -> None:
    source, target = torch.arange(1, 6), torch.arange(1, 4)
    uneven = {"input_ids": source, "attention_mask": torch.ones(5), "labels": target}
    with pytest.raises(ValueError, match="one common first dimension"):
        ps.pack([uneven], max_tokens=10)
    even = {**uneven, "labels": functional.pad(target, (0, 2), value=-100)}
    _, apply = ps.from_module(model("T5"))
    params, _ = ps.from_module(model("T5"))
    alone = apply(params, source[None], labels=target[None]).logits[0]
    (m,) = ps.pack([even], max_tokens=10)
    together = apply(params, **m).logits[0, :3]
    # The decoder attends to nothing that comes later.
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def with_dropout(family: str) -> Any:
    own = model(family)
    for module in own.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return own


def logits_of(own: nn.Module, seed: int, rows: int = 2) -> Tensor:
    params, apply = ps.from_module(own)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return apply(params, torch.arange(12).view(2, 6)[:rows]).logits


def test_dropout_draws_from_the_global_generator() -> None:
    own = with_dropout("GPT-2")
    assert torch.equal(logits_of(own, 0), logits_of(own, 0))
    assert not torch.equal(logits_of(own, 0), logits_of(own, 1))
    # So what is drawn for a row depends on the rows beside it.
    assert not torch.equal(logits_of(own, 0)[:1], logits_of(own, 0, rows=1))


def test_what_is_loaded_is_in_evaluation_mode(tmp_path: Any) -> None:
    with_dropout("GPT-2").save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert not loaded.training
    for module in loaded.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert torch.equal(logits_of(loaded, 0), logits_of(loaded, 1))
    assert not torch.equal(logits_of(loaded.train(), 0), logits_of(loaded.train(), 1))


def test_padding_on_the_left_needs_positions() -> None:
    def left(example: Any) -> dict[str, Tensor]:
        missing = 10 - len(example["input_ids"])
        fillings = {"labels": -100}
        return {
            key: functional.pad(value, (missing, 0), value=fillings.get(key, 0))
            for key, value in example.items()
        }

    group = [{key: torch.stack([left(e)[key] for e in examples("GPT-2")]) for key in ("input_ids", "attention_mask", "labels")}]  # fmt: skip

    def inputs(m: Any, positions: bool) -> dict[str, Any]:
        mask = m["attention_mask"]
        given = {"input_ids": m["input_ids"], "attention_mask": mask, "use_cache": False}
        own = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        return {**given, **own} if positions else given

    assert off("GPT-2", group, functools.partial(inputs, positions=True)) < RIGHT
    assert off("GPT-2", group, functools.partial(inputs, positions=False)) > WRONG
    labels = ps.shift_labels(group[0]["input_ids"], group[0]["attention_mask"])
    assert torch.equal(labels, group[0]["labels"])


def test_checkpoints_under_transforms_are_refused() -> None:
    def grads(own: nn.Module) -> Any:
        params, apply = ps.from_module(own)
        return torch.func.grad(lambda p: apply(p, torch.arange(4)[None]).logits.sum())(params)

    own = model("Llama", checkpoints=True)
    own.disable_input_require_grads()
    with pytest.raises(ValueError, match="activation_checkpointing_disable"):
        grads(own)
    own = model("Llama", checkpoints=True)
    own.activation_checkpointing_disable()
    with pytest.raises(ValueError, match="disable_input_require_grads"):
        grads(own)
    own.disable_input_require_grads()
    grads(own)


def test_adapters_under_checkpoints_with_inputs_that_require_grad() -> None:
    own = model("LoRA on Llama", checkpoints=True)
    own.enable_input_require_grads()
    inputs = ("input_ids", "attention_mask")
    assert off("LoRA on Llama", padded(), lambda m: {key: m[key] for key in inputs}, own) < RIGHT


def test_tied_embeddings_train_under_either_name() -> None:
    own = model("Llama, tied")
    for trainable in ("lm_head.weight", "*embed_tokens*", lambda name, _: name == "lm_head.weight"):
        params, _ = ps.from_module(own, trainable=trainable)
        assert [*params] == ["model.embed_tokens.weight"]


def test_what_no_tensor_is_may_stand_in_a_microbatch() -> None:
    group = [transformers.BatchEncoding({**m, "text": ["a", "b"]}) for m in padded()]
    inputs = ("input_ids", "attention_mask")
    assert off("Llama", group, lambda m: {key: m[key] for key in inputs}) < RIGHT
    with pytest.raises(ValueError, match="make tensors of them"):
        ps.pack([{"input_ids": torch.ones(3), "text": "a"}], max_tokens=4)


def test_rotary_tables_are_rounded_by_to_but_not_by_dtype() -> None:
    exact = llama().model.rotary_emb.inv_freq
    config = llama().config
    asked = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert asked.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(asked.model.rotary_emb.inv_freq, exact)
    rounded = llama().to(torch.bfloat16).model.rotary_emb.inv_freq
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded.float(), exact)


def mixtral(dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.MixtralConfig(
        **ROTARY, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config).to(dtype).train()


def test_a_routers_loss_belongs_to_the_microbatch() -> None:
    own = mixtral()
    params, apply = ps.from_module(own)
    group = padded()

    def loss_fn(params: Any, m: Any) -> ps.LossTerms:
        output = apply(params, m["input_ids"], m["attention_mask"])
        losses = ps.losses.cross_entropy(output.logits, m["labels"])
        return ps.LossTerms(losses, microbatch=output.aux_loss)

    optimizer = ps.optim.sgd(0.1, momentum=0.9)
    _, opt_state, _ = ps.make_update_step(loss_fn, optimizer)(params, optimizer.init(params), group)
    tokens = sum((m["labels"] != -100).sum() for m in group)
    for m in group:
        output = own(m["input_ids"], m["attention_mask"])
        losses = ps.losses.cross_entropy(output.logits, m["labels"])
        (losses.sum() / tokens + output.aux_loss / len(group)).backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(opt_state[0].trace[name], parameter.grad)
    (big,) = ps.pack(examples("Llama"), max_tokens=100)
    mean = sum(own(m["input_ids"], m["attention_mask"]).aux_loss for m in group) / len(group)
    whole = own(big["input_ids"], big["attention_mask"]).aux_loss
    assert abs(mean - whole) > WRONG


def test_hidden_states_are_those_of_the_call() -> None:
    own = model("Llama")
    params, apply = ps.from_module(own)
    ids = torch.arange(4)[None]
    for _ in range(3):
        assert len(apply(params, ids, output_hidden_states=True).hidden_states) == 3
    assert forward_hooks(own) == 0
    axis = ps.testing.ThreadAxis(2)
    count = axis.map(lambda ids: len(apply(params, ids, output_hidden_states=True).hidden_states))
    assert count([ids, ids + 4]) == [3, 3]


def test_the_config_is_shared() -> None:
    own = model("Llama", "sdpa")
    params, apply = ps.from_module(own)
    mask = ps.segment_mask(torch.ones(1, 4))
    apply(params, torch.arange(4)[None], mask)
    own.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager attention would add"):
        apply(params, torch.arange(4)[None], attention_mask=mask)


def test_the_lowest_number_of_float64_is_infinite_to_eager_attention() -> None:
    (m,) = ps.pack(examples("Mistral"), max_tokens=100)
    given = {key: m[key] for key in ("input_ids", "attention_mask")}
    assert model("Mistral", "eager")(**given).logits.isnan().any()
    assert model("Mistral", "eager", dtype=torch.float32)(**given).logits.isfinite().all()
    assert model("Mistral")(**given).logits.isfinite().all()


def shifted_by_company(own: nn.Module, inputs: Inputs) -> float:
    """By how much the loss of texts changes when they share a row."""
    params, apply = ps.from_module(own.train())

    def total(batch: Any, more: dict[str, Any]) -> Tensor:
        logits = apply(params, input_ids=batch["input_ids"], use_cache=False, **more).logits
        return ps.losses.cross_entropy(logits, batch["labels"]).sum().detach()

    alone = sum(total(ps.pack([text], max_tokens=100)[0], {}) for text in examples("Llama"))
    (row,) = packed()
    return float((total(row, inputs(row)) / alone - 1).abs())


def of_segments(m: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"], "attention_mask": ps.segment_mask(m["segments"])}


def of_positions(m: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"]}


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """With weights that are not too small for a model to look beyond the last token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = make()
        for parameter in own.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        return own.to(torch.float64)


def test_some_decoders_do_not_read_documents_from_positions() -> None:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0,
    )  # fmt: skip
    own = drawn(lambda: transformers.OPTForCausalLM(config))
    assert shifted_by_company(own, of_positions) > WRONG
    assert shifted_by_company(own, of_segments) < RIGHT


def test_layers_that_differ_take_a_mask_each() -> None:
    config = transformers.Gemma3TextConfig(
        **ROTARY, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    own = drawn(lambda: transformers.Gemma3ForCausalLM(config))

    def of_each_kind(m: Any) -> dict[str, Any]:
        segments = m["segments"]
        masks = {
            "full_attention": ps.segment_mask(segments),
            "sliding_attention": ps.segment_mask(segments, window=WINDOW),
        }
        return {"position_ids": m["positions"], "attention_mask": masks}

    def of_one_window(m: Any) -> dict[str, Any]:
        mask = ps.segment_mask(m["segments"], window=WINDOW)
        return {"position_ids": m["positions"], "attention_mask": mask}

    # Its norms are computed in float32.
    assert shifted_by_company(own, of_each_kind) < 1e-6
    assert shifted_by_company(own, of_positions) < 1e-6
    assert shifted_by_company(own, of_segments) > 1e-4
    assert shifted_by_company(own, of_one_window) > 1e-4


def test_a_state_flows_from_document_to_document() -> None:
    config = transformers.BambaConfig(
        **ROTARY, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4,
        mamba_chunk_size=4, mamba_n_groups=1,
    )  # fmt: skip
    own = drawn(lambda: transformers.BambaForCausalLM(config))
    assert shifted_by_company(own, of_segments) > WRONG
