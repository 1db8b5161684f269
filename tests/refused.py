"""What a refusal says and leaves as it was, and a module that is refused."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn


@contextmanager
def refused(model, *message):
    """What runs within raises a ValueError with all parts of `message`, and leaves the model as it was."""
    modules, tensors = dict(model.named_modules()), model.state_dict(keep_vars=True)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    attributes = {path: {**vars(module)} for path, module in modules.items()}
    hooks = {path: (*module._forward_hooks, *module._forward_pre_hooks) for path, module in modules.items()}
    with pytest.raises(ValueError) as info:
        yield
    assert [part for part in message if part not in str(info.value)] == [], str(info.value)
    assert dict(model.named_modules()) == modules
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(tensors)
    assert all(now[name] is tensors[name] and torch.equal(now[name].double(), values[name].double()) for name in now)
    for path, module in modules.items():
        assert vars(module).keys() == attributes[path].keys()
        assert [name for name, value in vars(module).items() if value is not attributes[path][name]] == []
        assert (*module._forward_hooks, *module._forward_pre_hooks) == hooks[path]


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2
