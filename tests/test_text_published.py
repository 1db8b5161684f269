"""Published text encoders on meta: the sizes they are known by, and that each rank holds its share and little more."""

import pytest
import torch
import transformers

from tp_layers.describe import describe
from tp_layers.plans.families import PUBLISHED

# Billions of parameters, and the most ranks that the heads of text and image towers allow.
MODELS = {
    "T5-XXL v1.1": (4.76, 64),
    "UMT5-XXL": (5.68, 64),
    "Llama-3.1-8B": (8.03, 8),
    "Qwen3-4B": (4.02, 8),
    "Qwen3-8B": (8.19, 8),
    "Gemma-2-2B": (2.61, 4),
    "SmolLM3-3B": (3.08, 4),
    "GLM-4-9B": (8.78, 2),
    "Mistral-Small-3.1-24B": (23.34, 8),
    "Gemma-3-12B": (12.19, 8),
    "Qwen2.5-VL-7B": (8.29, 4),
    "Qwen3-VL-4B": (4.44, 8),
}


def test_these_are_all_of_them():
    assert set(MODELS) == {name for name, (cls, _) in PUBLISHED.items() if hasattr(transformers, cls)}


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_holds_its_share(name):
    billions, size = MODELS[name]
    cls, entries = PUBLISHED[name]
    model_class = getattr(transformers, cls)
    with torch.device("meta"):
        model = model_class._from_config(model_class.config_class(**entries), dtype=torch.bfloat16)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2) == billions
    report = describe(model, size=size)
    assert report.sizes[-1] >= size and report.notes == []
    # Norms, and what comes before and after the image towers.
    assert 0 < report.held_bytes / report.full_bytes - 1 / size < 0.002
