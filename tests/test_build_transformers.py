"""A model of transformers before its weights: built without work, and without a trace outside of it."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import initialization

from memory import Touched
from text_models import T5, TEXT_MODELS
from tp_layers.loader.meta import building
from tp_layers.loader.pretrained import build_pretrained

LARGE = dict(T5, vocab_size=4096, d_model=256, d_ff=1024)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_only_parameters_are_on_meta(tmp_path, name):
    text = TEXT_MODELS[name]
    wanted = text.build(torch.bfloat16)
    wanted.config.save_pretrained(tmp_path)
    model: Any = build_pretrained(text.cls, tmp_path, torch.bfloat16)
    assert list(model.state_dict()) == list(wanted.state_dict())
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not any(module.training for module in model.modules())
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def no_initialisers(monkeypatch):
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # Buffers do get their values.
        assert not isinstance(tensor, nn.Parameter), "an initialiser ran"

    for name in initialization.TORCH_INIT_FUNCTIONS:
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, initialise)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_no_initialiser_of_transformers_runs(tmp_path, no_initialisers, name):
    text = TEXT_MODELS[name]
    getattr(transformers, text.config)(**text.settings()).save_pretrained(tmp_path)
    build_pretrained(text.cls, tmp_path, torch.float32)
    with pytest.raises(AssertionError, match="an initialiser ran"):
        text.build()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


ZEROS = {
    "its extents": lambda: torch.zeros(16, 1 << 20),
    "a shape": lambda: torch.zeros((4, 4, 1 << 20)),
    "a dtype": lambda: torch.zeros(size=(32, 1 << 20), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("given", ZEROS)
def test_large_zeros_take_no_memory_until_they_are_written(given):
    before = resident()
    with building(torch.float32):
        made = ZEROS[given]()
    assert made.nbytes == 64 << 20 and resident() - before < 8 << 20
    wanted = ZEROS[given]()
    assert resident() - before > 60 << 20
    assert made.dtype == wanted.dtype and torch.equal(made, wanted) and made.is_contiguous()
    made += 1
    assert made.sum() == made.numel()


def test_building_runs_no_initialisers_and_fills_no_memory(tmp_path):
    transformers.T5Config(**LARGE).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    with Touched() as touched:
        build_pretrained(transformers.T5EncoderModel, tmp_path, torch.bfloat16)
    # A norm's `torch.ones`, the largest thing its constructors write.
    assert touched.nbytes == 256 * 2 and torch.equal(torch.get_rng_state(), before)
    with Touched() as touched:
        transformers.T5EncoderModel(transformers.T5Config(**LARGE))
    assert touched.nbytes >= 4096 * 256 * 4 and not torch.equal(torch.get_rng_state(), before)


class Slow(transformers.T5EncoderModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        time.sleep(0.3)


def test_building_leaves_other_threads_alone(tmp_path):
    transformers.T5Config(**T5).save_pretrained(tmp_path)
    initialise, register = transformers.PreTrainedModel.init_weights, nn.Module.register_parameter
    thread = threading.Thread(target=build_pretrained, args=(Slow, tmp_path, torch.float32))
    thread.start()
    time.sleep(0.1)
    during: Any = transformers.T5EncoderModel(transformers.T5Config(**T5))
    thread.join()
    assert during.shared.weight.device.type == "cpu" and during.shared.weight.std() > 0.5
    # T5's norms are 1 by their constructor, its table of positions is drawn by the initialiser alone.
    table = during.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert 0.1 < table.std() < 0.5
    assert transformers.PreTrainedModel.init_weights is initialise and nn.Module.register_parameter is register


def test_a_diffusers_model_needs_no_transformers():
    # Importing it takes seconds.
    code = "import sys; import tp_layers.loader.load; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
