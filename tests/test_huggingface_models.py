"""What models of transformers do by themselves: dropout, modes, rotary tables, hidden states, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import purestep as ps
from tests.families import llama, model
from tests.torch_private import forward_hooks


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


def test_checkpoints_under_transforms_are_refused() -> None:
    def grads(own: nn.Module) -> Any:
        params, apply = ps.from_module(own)
        return torch.func.grad(lambda p: apply(p, torch.arange(4)[None]).logits.sum())(params)

    own = model("Llama", checkpoints=True)
    own.disable_input_require_grads()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's own words
        grads(own)
    own = model("Llama", checkpoints=True)
    own.activation_checkpointing_disable()
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
        grads(own)
    own.disable_input_require_grads()
    grads(own)


def test_rotary_tables_are_rounded_by_to_but_not_by_dtype() -> None:
    exact = llama().model.rotary_emb.inv_freq
    config = llama().config
    asked = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert asked.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(asked.model.rotary_emb.inv_freq, exact)
    rounded = llama().to(torch.bfloat16).model.rotary_emb.inv_freq
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded.float(), exact)


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
