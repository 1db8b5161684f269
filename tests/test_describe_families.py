"""`describe` of the families: tiny models as when they are sharded, published ones by their own structure."""

import re

import diffusers
import pytest
import torch

import tp_layers
from families import FAMILIES
from tp_layers.describe import Collective, describe
from tp_layers.group import Group


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def test_a_sharded_model_is_described_as_it_was_before(name, size):
    model = FAMILIES[name].build()
    before = describe(model, size=size)
    # On the last rank; neither sharding nor describing takes a collective without weights.
    sharded = tp_layers.apply(model.to("meta"), group=Group(size - 1, size))
    after = describe(sharded)
    assert after == before and describe(sharded, size=size) == before
    held = sum(tensor.numel() * tensor.element_size() for tensor in sharded.state_dict().values())
    assert after.held_bytes == held
    assert after.full_bytes == sum(tensor.nbytes for tensor in FAMILIES[name].build().state_dict().values())


# Written by hand from the models' own structure: the parameters of the published configurations that are cut.
QKV = r"attn\.(to|add)_[qkv](_proj)?\.(weight|bias)$"
OUT = r"attn\.to_(out\.0|add_out)\.weight$"
MLP = r"\.net\.0\.proj\.(weight|bias)$|\.net\.2\.weight$"
CUT = {
    "FluxTransformer2DModel": f"{QKV}|{OUT}|{MLP}|single.*(proj_mlp\\.(weight|bias)|proj_out\\.weight)$",
    "Flux2Transformer2DModel": f"{QKV}|{OUT}|ff(_context)?\\.linear_(in|out)\\.weight$"
    "|single.*attn\\.(to_qkv_mlp_proj|to_out)\\.weight$",
    "QwenImageTransformer2DModel": f"{QKV}|{OUT}|{MLP}",
    "MiniMaxH3Transformer3DModel": f"{QKV}|{OUT}|{MLP}",
}
# Of a few rows, cut along their output and gathered.
MODULATION = {
    "FluxTransformer2DModel": r"transformer_blocks\.\d+\.norm(1|1_context)?\.linear\.(weight|bias)$",
    "QwenImageTransformer2DModel": r"(img|txt)_mod\.1\.(weight|bias)$",
    "MiniMaxH3Transformer3DModel": r"adaln_proj\.linear\.(weight|bias)$",
}
# Text streams, whose sums go along with the image stream's.
ALONG = {"Flux2Transformer2DModel": r"transformer_blocks\.\d+\.(attn\.to_add_out|ff_context\.linear_out)\.weight$"}


@pytest.mark.parametrize("name", CUT)
def test_published_configurations_on_meta(name):
    with torch.device("meta"):
        model = getattr(diffusers, name)()
    names = [key for key, _ in model.named_parameters()]
    modulation = {key for key in names if re.search(MODULATION.get(name, "(?!)"), key)}
    cut = {key for key in names if re.search(CUT[name], key)} | modulation
    report = describe(model, size=4)
    assert {tensor.name for tensor in report.tensors if tensor.spec is not None} == cut
    stored = model.state_dict()
    full, held = 0, 0
    for key, tensor in stored.items():
        nbytes = tensor.numel() * tensor.element_size()
        full, held = full + nbytes, held + (nbytes // 4 if key in cut else nbytes)
    assert (report.full_bytes, report.held_bytes) == (full, held)
    assert full > 40e9 and 0.25 < held / full < 0.28
    assert f"each rank holds  {held / 1e9:.2f} GB, {held / full:.1%} of the model" in str(report)
    # One all-reduce for each rowwise layer or two, and one all-gather for each modulation, of a row of its output.
    rows = [key for key in cut if next(it for it in report.tensors if it.name == key).spec.dim == 1]
    gathered = [key for key in modulation if key.endswith("weight")]
    along = [key for key in rows if re.search(ALONG.get(name, "(?!)"), key)]
    wanted = [
        Collective(
            kind, len(set(keys) - set(along)), sum(stored[key].shape[0] * stored[key].element_size() for key in keys)
        )
        for kind, keys in (("all-gather", gathered), ("all-reduce", rows))
        if keys
    ]
    assert sorted(report.collectives, key=lambda it: it.kind) == wanted
