"""Text models with fewer kv heads than query heads, on more ranks than kv heads or unevenly, as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tp_layers
from checkpoints import identical, state_of
from close import FLOAT32, compare, randomise, relative_error
from families import digest
from text_models import TEXT, decoder
from tp_layers.group import Group
from tp_layers.plans import spec
from tp_layers.plans.attention import Attention

# Query heads, kv heads, ranks, uneven.
TEXTS = {"shared": (4, 2, 4, False), "one for all": (8, 1, 4, False), "uneven": (6, 3, 2, True)}
MODELS = {"Llama": ("LlamaForCausalLM", "LlamaConfig"), "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config")}
IDS = torch.tensor([[3, 5, 7, 9, 11], [4, 6, 8, 10, 12]])
MASK = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])


def text_model(name: str, heads: int, kv_heads: int, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 48, "num_hidden_layers": 1}
    config = getattr(transformers, MODELS[name][1])(**{**TEXT, **counts})
    return randomise(getattr(transformers, MODELS[name][0])._from_config(config, attn_implementation=attention)).eval()


def logits(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=IDS, attention_mask=mask).logits for mask in (None, MASK)]


def turned(pieces: int, rank: int, size: int) -> tuple[int, int]:
    """Shared kv heads dealt out one after the other: every width is right, and ranks read the heads of others."""
    return (rank % pieces, rank % pieces + 1) if pieces < size else (rank * pieces // size, (rank + 1) * pieces // size)


def wrongly_shared(group: Group) -> list[torch.Tensor]:
    run_of, check = spec._run, Attention._check
    model, plan = text_model("Llama", 4, 2, "sdpa"), decoder("model.layers")
    spec._run = turned
    try:
        with pytest.raises(ValueError, match="read more than one of the 2 kv heads"):
            tp_layers.apply(model, plan, group=group)
        Attention._check = lambda self, size, uneven: None  # type: ignore[method-assign]
        return logits(tp_layers.apply(model, plan, group=group))
    finally:
        spec._run, Attention._check = run_of, check  # type: ignore[method-assign]


def test_the_kv_heads_of_other_ranks_are_refused_and_would_be_seen(ranks):
    wanted = logits(text_model("Llama", 4, 2, "sdpa"))
    for outputs in ranks(4, wrongly_shared):
        assert all(relative_error(got, full) > 1000 * FLOAT32 for got, full in zip(outputs, wanted, strict=True))


def text(group: Group, case: tuple[Any, ...], uneven: bool, folder: Path) -> Any:
    """The outputs, of the model and of what is loaded from its snapshot, of which one rank's are sent."""
    how = {"plan": decoder("model.layers"), "group": group, "uneven": uneven}
    model = tp_layers.apply(text_model(*case), **how)
    outputs = logits(model)
    tp_layers.save(model, folder / "shards", sharded=True)
    tp_layers.save(model, folder / "whole")
    again = tp_layers.load(type(model), folder / "shards", **how)
    again.set_attn_implementation(case[-1])
    same = identical(again.state_dict(), model.state_dict()) and digest(logits(again)) == digest(outputs)
    return (outputs if group.rank == 0 else [], digest(outputs)), same


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "uneven"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_text_models_with_grouped_heads(ranks, tmp_path, name, heads, kv_heads, size, uneven, attention):
    case = (name, heads, kv_heads, attention)
    model = text_model(*case)
    results = ranks(size, text, case, uneven, tmp_path)
    assert compare([outputs for outputs, _ in results], logits(model)) <= FLOAT32
    assert all(same for _, same in results)
    assert identical(state_of(tmp_path / "whole"), dict(model.state_dict()))
