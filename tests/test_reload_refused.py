"""`reload`: what does not fit changes nothing, and a failure on any rank leaves no mixture in use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tp_layers
from checkpoints import state_of
from refused import refused
from reload_case import FILE, right, two_toys
from toy import PLAN, Toy
from tp_layers.group import Group
from tp_layers.loader.read import Job, Reader

ONE = Group()


@pytest.fixture
def toys(tmp_path) -> tuple[Path, Path]:
    """The folders of two `Toy`s of other weights."""
    return two_toys(tmp_path)


def spoilt(folder: Path, change: str) -> Path:
    """A checkpoint that does not fit a `Toy`."""
    state, config = load_file(folder / FILE), json.loads((folder / "config.json").read_text())
    if change == "a missing tensor":
        del state["down.bias"]
    elif change == "an extra tensor":
        state["other"] = torch.ones(2)
    elif change == "another shape":
        state["up.weight"] = torch.ones(8, 7)
    elif change == "a shard in place of a parameter":
        state["up.weight"] = state["up.weight"][:4].clone()
    elif change == "integers":
        state["up.weight"] = state["up.weight"].to(torch.int8)
    elif change == "another config":
        config["hidden"] = 16
    elif change == "another class":
        config["_class_name"] = "Other"
    elif change == "a quantised one":
        config["quantization_config"] = {"load_in_4bit": True}
    save_file(state, folder / FILE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CHANGES = {
    "a missing tensor": "lacks ['down.bias']",
    "an extra tensor": "has ['other']",
    "another shape": "'up.weight' is (8, 7) in the checkpoint, Toy has (8, 6)",
    "a shard in place of a parameter": "'up.weight' is (4, 6) in the checkpoint, Toy has (8, 6)",
    "integers": "'up.weight' is torch.int8 in the checkpoint",
    "another config": "of another architecture: 'hidden' is 16 there, 8 here",
    "another class": "of another architecture: '_class_name' is 'Other' there, 'Toy' here",
    "a quantised one": "has a quantization_config",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_does_not_fit_changes_nothing(toys, change):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=Group(1, 2))
    folder = spoilt(toys[1], change)
    with refused(model, CHANGES[change]):
        tp_layers.reload(model, folder)


def test_extra_tensors_are_left_out_where_asked(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    tp_layers.reload(model, spoilt(toys[1], "an extra tensor"), check=False)
    assert torch.equal(model.up.weight, state_of(toys[1])["up.weight"])


def test_a_model_that_cannot_be_reloaded_is_refused(toys):
    with refused(Toy(), "this Toy is not sharded by tp_layers"):
        tp_layers.reload(Toy(), toys[0])
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    model.up = nn.Linear(3, 4)
    with refused(model, "'up.weight' is (4, 3), not a shard of (8, 3)"):
        tp_layers.reload(model, toys[1])


def test_a_tensor_that_no_file_can_be_read_into_is_refused(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    model.down.weight = nn.Parameter(model.down.weight.detach().T.contiguous().T)
    with refused(model, "'down.weight' is not contiguous"):
        tp_layers.reload(model, toys[1])
    with torch.inference_mode():
        model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    with pytest.raises(ValueError, match=r"was made under torch.inference_mode\(\): reload under it too"):
        tp_layers.reload(model, toys[1])
    with torch.inference_mode():
        assert right(tp_layers.reload(model, toys[1]), state_of(toys[1]))


def reload_message(group: Group, first: Path, second: Path, fails: bool) -> dict[str, Any]:
    """What each rank is told when rank 1 fails: before it reads (its folder is missing), or at its last tensor."""
    model = tp_layers.load(Toy, first, plan=PLAN, group=group)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = Reader.read

    def fail(self: Reader, job: Job) -> None:
        if group.rank == 1 and job is self.jobs[-1]:
            raise OSError(f"rank 1 cannot read '{job.name}'")
        own(self, job)

    elsewhere = second / "missing" if group.rank == 1 and not fails else second
    try:
        Reader.read = fail if fails else own  # type: ignore[method-assign]
        with pytest.raises((OSError, ValueError)) as error:
            tp_layers.reload(model, elsewhere)
    finally:
        Reader.read = own  # type: ignore[method-assign]
    said = {"message": str(error.value)}
    said["kept"] = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, call in (("run", lambda: model(torch.ones(1, 6))), ("save", lambda: tp_layers.save(model, first))):
        try:
            call()
        except (RuntimeError, ValueError) as problem:
            said[name] = str(problem)
    tp_layers.reload(model, second)
    said["again"] = right(model, state_of(second)) and bool(model(torch.ones(1, 6)).isfinite().all())
    return said


def test_a_rank_that_fails_beforehand_leaves_every_rank_as_it_was(ranks, toys):
    for said in ranks(2, reload_message, *toys, False):
        assert "rank 1 of 2 failed: FileNotFoundError" in said["message"] or "neither a folder" in said["message"]
        assert said["kept"] and said["again"] and "run" not in said and "save" not in said


def test_after_a_failure_while_reading_no_rank_runs_or_saves_a_mixture(ranks, toys):
    for said in ranks(2, reload_message, *toys, True):
        assert "rank 1 cannot read" in said["message"]
        assert "until it is reloaded, the model's weights are of two checkpoints" in said["run"]
        assert "the model's weights are of two checkpoints" in said["save"]
        assert said["again"]
