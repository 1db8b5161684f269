"""`load`: dtypes, buffers, tables and tied parameters are those that from_pretrained gives."""

from pathlib import Path

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save_file
from torch import nn

import tp_layers
from checkpoints import CLASSES, identical, several_files, state_of
from families import FAMILIES
from index_files import by_hand, info
from pretrained import attributes, under
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.index import DTYPES, read_index

ONE = Group()
HALF = torch.bfloat16
NAMES = {dtype: name for name, dtype in DTYPES.items()}
names = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in several files."""
    return several_files(tmp_path_factory)


@pytest.fixture
def toy(tmp_path) -> Path:
    """The folder of a `Toy` in float32, to be spoilt."""
    save_toy(tmp_path)
    return tmp_path


@pytest.mark.parametrize("stored", [torch.float32, HALF, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Toy", "MiniMaxH3Transformer3DModel", "Flux2Transformer2DModel"])
def test_without_a_dtype_everything_is_as_stored(checkpoint, name, stored):
    folder = checkpoint(name, stored)
    model = tp_layers.load(CLASSES[name], folder, plan=PLAN if name == "Toy" else None, group=ONE)
    state = state_of(folder)
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key in state:
            assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key


@names
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=["bfloat16", "float16"])
def test_a_dtype_casts_all_but_what_the_class_keeps_in_float32(checkpoint, name, dtype):
    model = tp_layers.load(CLASSES[name], checkpoint(name), group=ONE, dtype=dtype)
    state, keep = state_of(checkpoint(name)), set(CLASSES[name]._keep_in_fp32_modules or [])
    kept = 0
    for key, tensor in model.state_dict().items():
        is_kept = bool(keep & set(key.split(".")))
        kept += is_kept
        assert tensor.dtype == (torch.float32 if is_kept else dtype), key
        assert torch.equal(tensor, state[key].to(tensor.dtype)), key
    assert bool(kept) == (name == "MiniMaxH3Transformer3DModel")


@names
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
def test_buffers_and_tables_are_those_of_from_pretrained(checkpoint, name, dtype):
    model = tp_layers.load(CLASSES[name], checkpoint(name), group=ONE, dtype=dtype)
    wanted = attributes(under(dtype, CLASSES[name], FAMILIES[name].config(4)))
    got = attributes(model)
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key
    if CLASSES[name]._keep_in_fp32_modules is None:
        # from_pretrained itself, which without accelerate refuses classes that keep modules in float32.
        theirs = CLASSES[name].from_pretrained(checkpoint(name), torch_dtype=dtype, low_cpu_mem_usage=False)
        for key, tensor in [*theirs.state_dict().items(), *attributes(theirs).items()]:
            mine = {**model.state_dict(), **got}[key]
            assert mine.dtype == tensor.dtype and torch.equal(mine, tensor), key


@pytest.mark.parametrize("dtype", [None, HALF], ids=["as stored", "bfloat16"])
def test_buffers_of_a_checkpoint_are_read(tmp_path, dtype):
    state = save_toy(tmp_path)
    state |= {"scale": torch.full((6,), 1.2345), "steps": torch.tensor([7, 8, 9])}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, dtype=dtype)
    assert torch.equal(model.scale, state["scale"].to(dtype or torch.float32))
    assert torch.equal(model.steps, state["steps"]) and model.steps.dtype == torch.int64
    # A table that no checkpoint holds, and those in plain attributes.
    assert torch.equal(model.table, under(dtype, Toy, {}).table)
    assert all(not table.is_meta for table in attributes(model).values())


class Kinds(ModelMixin, ConfigMixin):
    """Tensors without a dim, without an element, of one byte an element; and one to shard."""

    @register_to_config
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 4, bias=False)
        self.gate, self.none = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.ones(0, 3))
        self.packed = nn.Parameter(torch.tensor([1.5, -2.0, 448.0]).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int16))


@pytest.mark.parametrize("dtype", [None, HALF], ids=["as stored", "bfloat16"])
def test_every_kind_of_tensor_is_read_at_any_offset(tmp_path, dtype):
    model = Kinds()
    model.save_config(tmp_path)
    # The mask's three bytes come first: everything after it lies at an odd offset.
    names, header, data = ["mask", "gate", "none", "up.weight", "steps", "packed"], {}, b""
    for name in names:
        tensor = model.state_dict()[name].contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = info(NAMES[tensor.dtype], list(tensor.shape), len(data), len(data) + len(raw))
        data += raw
    by_hand(tmp_path / "diffusion_pytorch_model.safetensors", {**header, "__metadata__": {"pad": "x" * 3}}, data)
    offsets = [entry.offset % 2 for entry in read_index(tmp_path).values()]
    assert 1 in offsets[1:]
    got = tp_layers.load(Kinds, tmp_path, plan={"up": "colwise_gather"}, group=ONE, dtype=dtype).state_dict()
    for name, tensor in model.state_dict().items():
        cast = dtype is not None and tensor.dtype == torch.float32
        assert identical({name: got[name]}, {name: tensor.to(dtype) if cast else tensor})


@pytest.mark.parametrize("kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]], ids=" and ".join)
def test_tied_parameters_share_one_storage(toy, kept):
    state = state_of(toy)
    value = state.pop("embed.weight")
    save_file({**state, **{name: value.clone() for name in kept}}, toy / "diffusion_pytorch_model.safetensors")
    model, report = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, report=True)
    assert model.embed.weight is model.head.weight and torch.equal(model.head.weight, value)
    assert model.shift is model.same_shift and not model.shift.requires_grad
    held = sum(tensor.nbytes for tensor in state.values()) + value.nbytes
    assert report.bytes_held == report.bytes_read == held
    wanted = Toy()
    wanted.load_state_dict({**state, "embed.weight": value, "head.weight": value, "same_shift": state["shift"]})
    x = torch.ones(2, 6)
    assert torch.equal(model(x), wanted(x))
