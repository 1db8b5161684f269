"""`load`: the folder of a checkpoint, below a path or in the hub's cache, and what is downloaded into it."""

import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

import tp_layers
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.folder import find_folder

ONE = Group()


def test_a_subfolder_is_a_component_of_a_pipeline(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    state = save_toy(folder)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, subfolder="transformer")
    assert torch.equal(model.up.weight, state["up.weight"])


def in_cache(cache: Path, inside: str = "") -> dict[str, torch.Tensor]:
    """A repository in a hub's cache as the hub's client lays it out: files are links to blobs."""
    repository = cache / "models--someone--toy"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40) / inside
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    state = save_toy(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    return state


@pytest.mark.parametrize("subfolder", [None, "transformer"], ids=["a model", "a component of a pipeline"])
def test_a_repository_in_the_cache_is_found_without_a_network(tmp_path, monkeypatch, subfolder):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    state = in_cache(tmp_path, subfolder or "")
    model = tp_layers.load(Toy, "someone/toy", plan=PLAN, group=ONE, subfolder=subfolder)
    assert torch.equal(model.up.weight, state["up.weight"]) and model.config._name_or_path == "someone/toy"
    with pytest.raises(FileNotFoundError):
        tp_layers.load(Toy, "someone/else", plan=PLAN, group=ONE)


@pytest.mark.parametrize("subfolder", [None, "transformer"], ids=["a model", "a component of a pipeline"])
def test_only_the_files_of_the_model_are_downloaded(tmp_path, monkeypatch, subfolder):
    asked = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "transformer").mkdir()
    assert find_folder("someone/toy", subfolder) == tmp_path / (subfolder or "")
    inside = f"{subfolder}/" if subfolder else ""
    wanted = [
        inside + name for name in (
            "config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
            "diffusion_pytorch_model-00001-of-00002.safetensors", "model-00010-of-00012.safetensors",
        )
    ]  # fmt: skip
    others = ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "flux1-dev.safetensors"]
    others += ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
    others += [f"transformer/{name}" for name in others]
    assert list(filter_repo_objects([*wanted, *others], allow_patterns=asked)) == wanted
