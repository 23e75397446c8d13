"""Models of transformers as they come: a step is ``loss.backward()`` on one big batch, and what README.md says of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

import purestep as ps
from tests.families import ROTARY, SETTINGS, Setting, cases, examples, measure, model
from tests.texts import RIGHT, WRONG, off, padded

# Of torch, for flash attention on a CPU under vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


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
