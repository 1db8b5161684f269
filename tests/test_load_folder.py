"""`load`: the folder of a checkpoint, below a path or in the hub's cache, and what is downloaded into it."""

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

import tp_layers
from fake_hub import COMMIT, FakeHub, failure
from families import FAMILIES
from index_files import write_index
from text_models import TEXT_MODELS
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.folder import find_folder

ONE = Group()
inside = pytest.mark.parametrize("subfolder", [None, "transformer", "parts/transformer"], ids=str)


def test_a_subfolder_is_a_component_of_a_pipeline(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    state = save_toy(folder)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, subfolder="transformer")
    assert torch.equal(model.up.weight, state["up.weight"])


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"revision='main' is for the id of a repository; {tmp_path} is a folder"):
        tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, revision="main")


def in_cache(cache: Path, inside: str = "") -> dict[str, torch.Tensor]:
    """A repository in a hub's cache as the hub's client lays it out: files are links to blobs."""
    repository = cache / "models--someone--toy"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT / inside
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    for revision in ("main", "v2"):
        (repository / "refs" / revision).write_text(COMMIT)
    state = save_toy(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    return state


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The cache of a hub that cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@inside
@pytest.mark.parametrize("revision", [None, "v2", COMMIT], ids=["no revision", "a tag", "a commit"])
def test_a_repository_in_the_cache_is_found_without_a_network(offline, subfolder, revision):
    state = in_cache(offline, subfolder or "")
    options: Any = dict(plan=PLAN, group=ONE, subfolder=subfolder)
    model = tp_layers.load(Toy, "someone/toy", **options, revision=revision)
    assert torch.equal(model.up.weight, state["up.weight"]) and model.config._name_or_path == "someone/toy"
    with pytest.raises(FileNotFoundError, match=r"'someone/else' is not in the cache, and the hub cannot be reached"):
        tp_layers.load(Toy, "someone/else", **options)
    with pytest.raises(FileNotFoundError, match=r"'someone/toy' of revision 'v3' is not in the cache"):
        tp_layers.load(Toy, "someone/toy", **options, revision="v3")
    with pytest.raises(FileNotFoundError, match=r"variant 'fp16' .* in the cache of 'someone/toy' \(the hub cannot be"):
        tp_layers.load(Toy, "someone/toy", **options, variant="fp16")


def test_a_checkpoint_that_is_in_the_cache_in_part_is_refused_without_a_network(offline):
    in_cache(offline)
    folder = offline / "models--someone--toy" / "snapshots" / COMMIT
    write_index(folder, {"up.weight": "diffusion_pytorch_model.safetensors", "down.weight": "other.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"'someone/toy' (is not in the cache|has no other\.safetensors)"):
        tp_layers.load(Toy, "someone/toy", plan=PLAN, group=ONE)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A pipeline with a transformer in several files and in one of another variant, and what else such a one has."""
    root = tmp_path_factory.mktemp("hub")
    for part in ("transformer", "parts/transformer", "."):
        model = FAMILIES["LTXVideoTransformer3DModel"].build()
        model.save_pretrained(root / part, max_shard_size="20KB")
        model.half().save_pretrained(root / part, variant="fp16")
    TEXT_MODELS["Qwen3"].save(root / "text_encoder")
    for name in ("model_index.json", "flux1-dev.safetensors", "diffusion_pytorch_model.bin", "README.md"):
        (root / name).write_text("{}")
        (root / "transformer" / name).write_text("{}")
    return root


def files(root: Path, subfolder: str | None, *patterns: str) -> list[str]:
    folder = root / (subfolder or "")
    return sorted(file.relative_to(root).as_posix() for pattern in patterns for file in folder.glob(pattern))


@inside
@pytest.mark.parametrize("variant", [None, "fp16"], ids=["several files", "one file of a variant"])
def test_only_the_files_of_the_model_are_downloaded(tmp_path, monkeypatch, repository, subfolder, variant):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    folder = find_folder("someone/toy", subfolder, variant, "v2")
    assert folder == hub.snapshot / (subfolder or "")
    several = ["diffusion_pytorch_model-*-of-*.safetensors", "diffusion_pytorch_model.safetensors.index.json"]
    wanted = files(repository, subfolder, "config.json", *(["*fp16.safetensors"] if variant else several))
    assert len(wanted) == 2 if variant else len(wanted) > 3
    assert sorted(hub.got) == wanted == files(hub.snapshot, None, "**/*.*")
    assert not any("generation_config" in name for name in hub.asked)
    # What follows is of the commit that the revision stood for.
    assert hub.revisions[0] == "v2" and set(hub.revisions[1:]) == {COMMIT}


def test_a_text_encoder_comes_with_its_generation_config(tmp_path, monkeypatch, repository):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    text = TEXT_MODELS["Qwen3"]
    model = tp_layers.load(text.cls, "someone/toy", plan=text.plan, group=ONE, subfolder="text_encoder")
    assert sorted(hub.got) == files(repository, "text_encoder", "*")
    assert model.name_or_path == "someone/toy" and "text_encoder/generation_config.json" in hub.got


def test_files_that_are_there_are_not_downloaded_again(tmp_path, monkeypatch, repository):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    find_folder("someone/toy", "transformer")
    shards = [name for name in hub.got if "-of-" in name]
    hub.got.clear()
    (hub.snapshot / shards[0]).unlink()
    find_folder("someone/toy", "transformer")
    assert len(shards) > 1 and "transformer/config.json" in hub.got
    hub.got.clear()
    find_folder("someone/toy", "transformer")
    assert not any("-of-" in name for name in hub.got)


TOLD: dict[str, tuple[Any, type[OSError], str]] = {
    "gated": (
        errors.GatedRepoError,
        PermissionError,
        "'someone/toy' is gated: ask for access at https://.*/someone/toy",
    ),
    "absent": (errors.RepositoryNotFoundError, FileNotFoundError, "there is no 'someone/toy' at .* `hf auth login`"),
    "no such revision": (errors.RevisionNotFoundError, FileNotFoundError, "'someone/toy' has no revision 'v2'"),
    "no config": (
        errors.RemoteEntryNotFoundError,
        FileNotFoundError,
        "has no config.json there: is the model in a sub",
    ),
    "no network": (
        errors.LocalEntryNotFoundError,
        FileNotFoundError,
        "'someone/toy' of revision 'v2' is not in the ca",
    ),
    "a broken answer": (
        errors.HfHubHTTPError,
        OSError,
        "cannot download 'someone/toy' of revision 'v2': the hub's own",
    ),
    "no id": (
        errors.HFValidationError,
        FileNotFoundError,
        "someone/toy is neither a folder nor the id of a repository",
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_an_error_of_the_hub_names_the_repository(tmp_path, monkeypatch, repository, case):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    raised, error, message = TOLD[case]
    hub.error = failure(raised)
    with pytest.raises(error, match=message):
        tp_layers.load(Toy, "someone/toy", plan=PLAN, group=ONE, revision="v2")


def test_a_variant_the_repository_lacks_is_refused_before_anything_large_is_read(tmp_path, monkeypatch, repository):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"of variant 'bf16' .* in 'someone/toy'; there are .* variant=None, variant='fp16'$"
    ):
        find_folder("someone/toy", "transformer", "bf16")
    assert hub.got == ["transformer/config.json"]


def test_a_file_that_the_index_names_and_the_repository_lacks_is_told(tmp_path, monkeypatch, repository):
    hub = FakeHub(monkeypatch, repository, tmp_path)
    listed = hub.list_repo_files("someone/toy")
    gone = next(name for name in listed if name.startswith("transformer/") and "-of-" in name)
    monkeypatch.setattr(hub, "list_repo_files", lambda *args, **kwargs: [name for name in listed if name != gone])
    with pytest.raises(FileNotFoundError, match=rf"'someone/toy' has no {gone}, which its .*index\.json names"):
        find_folder("someone/toy", "transformer")
