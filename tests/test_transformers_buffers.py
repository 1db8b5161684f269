"""A model of transformers with all that its from_pretrained treats in a way of its own: buffers, kept dtypes."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import initialization

import tp_layers
from as_pretrained import rewrite, tensors
from checkpoints import identical, state_of
from tp_layers.group import Group

ONE = Group()


class Drawn(transformers.PreTrainedModel):
    """A model with all that from_pretrained treats in a way of its own."""

    config_class = transformers.BertConfig
    _keys_to_ignore_on_load_missing = ("steps", "scale", "up")
    _keep_in_fp32_modules_strict = ("down",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("table", torch.linspace(0, 1, 7) ** 3, persistent=False)
        self.register_buffer("scale", torch.linspace(0, 1, 7) ** 3)
        self.register_buffer("exact", torch.linspace(0, 1, 7, dtype=torch.float64))
        self.register_buffer("steps", torch.arange(3))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Drawn):
            for buffer in (module.table, module.scale):
                initialization.copy_(buffer, torch.linspace(0, 1, 7) ** 3)
            initialization.copy_(module.steps, torch.arange(3))


DRAWN_PLAN = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["as stored", "bfloat16", "float16"])
@pytest.mark.parametrize("lacks", [(), ("steps", "scale")], ids=["whole", "buffers that may be missing"])
def test_buffers_and_kept_dtypes_are_those_of_from_pretrained(tmp_path, dtype, lacks):
    Drawn(transformers.BertConfig()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {name: it for name, it in state.items() if name not in lacks})
    model = tp_layers.load(Drawn, tmp_path, plan=DRAWN_PLAN, group=ONE, dtype=dtype)
    wanted = Drawn.from_pretrained(tmp_path, dtype=dtype or torch.float32)
    assert model.table.dtype == (dtype or torch.float32) and model.down.weight.dtype == torch.float32
    if dtype is None:
        # from_pretrained casts a buffer in float64 too.
        wanted.exact = state_of(tmp_path)["exact"]
    assert identical(tensors(model), tensors(wanted))


def test_a_parameter_that_may_be_missing_is_refused(tmp_path):
    Drawn(transformers.BertConfig()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {name: it for name, it in state.items() if name != "up.bias"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks \['up\.bias'\], which Drawn needs"):
        tp_layers.load(Drawn, tmp_path, plan=DRAWN_PLAN, group=ONE)
