"""`load(variant=...)`: the files of one precision, under the names diffusers and transformers give them."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

import tp_layers
from checkpoints import identical
from families import FAMILIES
from index_files import tensors, write_index
from text_models import TEXT_MODELS
from tp_layers.group import Group
from tp_layers.loader.index import read_index
from tp_layers.loader.layout import STEMS

ONE = Group()
LTX = FAMILIES["LTXVideoTransformer3DModel"]
LLAMA = TEXT_MODELS["Llama"]
CASES: dict[str, tuple[Any, Any, Any]] = {
    "diffusers": (diffusers.LTXVideoTransformer3DModel, None, LTX.build),
    "transformers": (LLAMA.cls, LLAMA.plan, LLAMA.build),
}
cases = pytest.mark.parametrize("case", CASES)


@cases
@pytest.mark.parametrize("limit", ["1GB", "6KB"], ids=["one file", "several files"])
def test_each_variant_is_that_of_from_pretrained(tmp_path, case, limit):
    cls, plan, build = CASES[case]
    build().save_pretrained(tmp_path, max_shard_size=limit)
    build().half().save_pretrained(tmp_path, variant="fp16", max_shard_size=limit)
    build().double().save_pretrained(tmp_path, variant="a.b-c_64", max_shard_size=limit)
    assert any("index.fp16.json" in file.name for file in tmp_path.iterdir()) == (limit != "1GB")
    for variant, dtype in ((None, torch.float32), ("fp16", torch.float16), ("a.b-c_64", torch.float64)):
        model = tp_layers.load(cls, tmp_path, plan=plan, group=ONE, variant=variant)
        # diffusers casts to float32 what it is not told to keep.
        wanted = cls.from_pretrained(tmp_path, variant=variant, torch_dtype=dtype)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
        assert identical(model.state_dict(), wanted.state_dict())


def test_the_names_diffusers_once_gave_a_variant_in_several_files(tmp_path):
    stem = STEMS[0]
    names = [f"{stem}-0000{number}-of-00002.fp16.safetensors" for number in (1, 2)]
    model = LTX.build().half()
    state = list(model.state_dict().items())
    model.save_config(tmp_path)
    save_file(dict(state[:9]), tmp_path / names[0])
    save_file(dict(state[9:]), tmp_path / names[1])
    write_index(tmp_path, {key: names[number >= 9] for number, (key, _) in enumerate(state)}, stem)
    (tmp_path / f"{stem}.safetensors.index.json").rename(tmp_path / f"{stem}.safetensors.fp16.index.json")
    model = tp_layers.load(diffusers.LTXVideoTransformer3DModel, tmp_path, group=ONE, variant="fp16")
    assert identical(model.state_dict(), dict(state))
    with pytest.raises(FileNotFoundError, match=r"there are those of variant='fp16'$"):
        read_index(tmp_path)


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        save_file(tensors("a"), folder / name)
    return folder


@pytest.mark.parametrize("stem", STEMS)
def test_a_variant_that_is_not_there_is_refused_with_those_that_are(tmp_path, stem):
    folder = with_files(tmp_path, f"{stem}.fp16.safetensors", f"{stem}.bf16-00001-of-00001.safetensors")
    write_index(folder, {"a": f"{stem}.bf16-00001-of-00001.safetensors"}, stem)
    (folder / f"{stem}.safetensors.index.json").rename(folder / f"{stem}.safetensors.index.bf16.json")
    there = r"; there are those of variant='bf16', variant='fp16'$"
    with pytest.raises(FileNotFoundError, match=rf"no safetensors weights \(.*\) in {folder}{there}"):
        read_index(folder)
    with pytest.raises(FileNotFoundError, match=rf"no safetensors weights of variant 'ema' \(.*\) in {folder}{there}"):
        read_index(folder, "ema")
    assert set(read_index(folder, "bf16")) == set(read_index(folder, "fp16")) == {"a"}
    with_files(folder, f"{stem}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"those of variant=None, variant='bf16', variant='fp16'$"):
        read_index(folder, "ema")


@pytest.mark.parametrize("variant", ["", ".", "..", "../x", "a/b", "/etc", "a b", "fp16."])
def test_a_variant_that_is_no_part_of_a_name_is_refused(tmp_path, variant):
    for path in (tmp_path, "someone/toy"):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(
            ValueError, match="variant must be the part of a file name that stands for it, such as 'fp1"
        ):
            tp_layers.load(LLAMA.cls, path, plan=LLAMA.plan, group=ONE, variant=variant)
