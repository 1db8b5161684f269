"""One rank that cannot, or that differs, ends `apply` and `load` on all ranks, within seconds and with the reason."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES
from pair import PLAN, Pair
from tp_layers.agree import Alarm, agreed, require_equal
from tp_layers.group import Group
from tp_layers.loader.read import Job, Reader


def parametrised(group: Group, model: nn.Module) -> dict:
    if group.rank == 1:
        nn.utils.parametrizations.weight_norm(model.up)
    return PLAN


def more_parameters(group: Group, model: nn.Module) -> dict:
    if group.rank == 1:
        model.extra = nn.Linear(2, 2)
    return PLAN


def another_plan(group: Group, model: nn.Module) -> dict:
    return {"up": "colwise_gather"} if group.rank == 1 else PLAN


def another_config(group: Group, model: nn.Module) -> dict:
    """Where it was read is not compared, nor what has no value that could be."""
    model.config = {"eps": 1e-6 * (1 + group.rank // 2), "_name_or_path": str(group.rank), "other": object()}
    model.config["nested"] = {1: "a", "b": 2, (3,): 4}
    return PLAN


def not_there(group: Group, model: nn.Module) -> dict:
    if group.rank == 1:
        model.down.to("meta")
    return PLAN


DIFFERS = "has another model, checkpoint, plan or size"
CASES = {
    "its model cannot be sharded": (parametrised, "rank 1 of 3 failed: ValueError", "parametrised"),
    "its model is another": (more_parameters, DIFFERS, DIFFERS),
    "its plan is another": (another_plan, DIFFERS, DIFFERS),
    "its config is another": (another_config, DIFFERS, DIFFERS),
    "it has not all weights": (not_there, DIFFERS, DIFFERS),
}


def message(group: Group, name: str) -> tuple[str, bool]:
    model = randomise(Pair(width=24))
    plan = CASES[name][0](group, model)
    with pytest.raises(ValueError) as error:
        tp_layers.apply(model, plan, group=group)
    return str(error.value), isinstance(model.down, nn.Linear)


@pytest.mark.parametrize("name", CASES)
def test_apply_ends_on_every_rank_with_the_model_untouched(ranks, name):
    _, others, own = CASES[name]
    said = ranks(3, message, name)
    assert others in said[0][0] and others in said[2][0] and own in said[1][0]
    assert all(untouched for _, untouched in said)


def load_message(group: Group, folder: str, elsewhere: str) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        tp_layers.load(Flux2Transformer2DModel, elsewhere if group.rank == 1 else folder, group=group)
    return f"{type(error.value).__name__}: {error.value}"


def unreadable(group: Group, folder: str) -> str:
    """Rank 1 cannot read one tensor, long after all headers were read."""
    read = Reader.read

    def fail(self: Reader, job: Job) -> None:
        if group.rank == 1 and "proj_out" in job.name:
            raise OSError(f"cannot read '{job.name}'")
        read(self, job)

    Reader.read = fail
    try:
        return load_message(group, folder, folder)
    finally:
        Reader.read = read


def test_load_ends_on_every_rank(ranks, tmp_path):
    FAMILIES["Flux2Transformer2DModel"].build().save_pretrained(tmp_path)
    missing = ranks(2, load_message, str(tmp_path), str(tmp_path / "missing"))
    assert missing[0].startswith("OtherRankError: rank 1 of 2 failed: FileNotFoundError")
    assert missing[1].startswith("FileNotFoundError")
    read = ranks(2, unreadable, str(tmp_path))
    assert read[0].startswith("OtherRankError: rank 1 of 2 failed: OSError: cannot read 'proj_out")
    assert read[1].startswith("OSError: cannot read 'proj_out")


def alike(group: Group) -> bool:
    model = tp_layers.apply(randomise(Pair()), PLAN, group=group)
    return bool(torch.isfinite(model(torch.ones(1, 8))).all())


def test_equal_ranks_agree(ranks):
    assert ranks(2, alike) == [True, True]


def other_checkpoint(group: Group, folder: Path, again: bool) -> str:
    """Rank 1 has the same model in other files, on a disk of its own."""
    model = tp_layers.load(Flux2Transformer2DModel, folder / "one", group=group)
    own = folder / ("several" if group.rank == 1 else "one")
    with pytest.raises(ValueError) as error:
        if again:
            tp_layers.reload(model, own)
        else:
            tp_layers.load(Flux2Transformer2DModel, own, group=group)
    return str(error.value)


@pytest.mark.parametrize("again", [False, True], ids=["load", "reload"])
def test_ranks_with_other_files_are_refused(ranks, tmp_path, again):
    model = FAMILIES["Flux2Transformer2DModel"].build()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    assert all(DIFFERS in said for said in ranks(2, other_checkpoint, tmp_path, again))


def alone(group: Group, folder: Path, given: dict[str, Any], call: str) -> str:
    """Rank 1 alone is given an argument that cannot be right."""
    given = given if group.rank == 1 else {}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        if call == "load":
            tp_layers.load(Flux2Transformer2DModel, folder, group=group, **given)
        else:
            tp_layers.apply(FAMILIES["Flux2Transformer2DModel"].build(), group=group, **given)
    return str(error.value)


ALONE = {
    "a backend there is none of": {"backend": "trition"},
    "a device there is none of": {"device": "cuda:7"},
    "no dtype": {"dtype": torch.int8},
    "an argument that cannot be kept": {"device_map": "auto"},
    "an unknown argument": {"variat": "fp16"},
    "a mapping onto another device": {"mmap": True, "device": "meta"},
    "another dtype of the sums": {"reduce_dtype": torch.float32},
    "unequal parts": {"uneven": True},
}


@pytest.mark.parametrize("given", ALONE)
def test_an_argument_of_one_rank_is_told_to_all_before_anything_is_read(ranks, tmp_path, given):
    FAMILIES["Flux2Transformer2DModel"].build().save_pretrained(tmp_path)
    said = ranks(2, alone, tmp_path, ALONE[given], "load")
    assert "rank 1 of 2 failed: " in said[0] or DIFFERS in said[0]


@pytest.mark.parametrize("given", ["a backend there is none of", "another dtype of the sums", "unequal parts"])
def test_an_option_of_one_rank_is_told_to_all_before_anything_is_sharded(ranks, tmp_path, given):
    said = ranks(2, alone, tmp_path, ALONE[given], "apply")
    assert "rank 1 of 2 failed: " in said[0] or DIFFERS in said[0]


def same_layout(group: Group, folders: list[Path], again: bool) -> tuple[str, str]:
    """Rank 1 reads another checkpoint of the same layout: a stale copy, or a link that was moved meanwhile."""
    model = tp_layers.load(Flux2Transformer2DModel, folders[0], group=group)
    with pytest.raises(ValueError) as error:
        if again:
            tp_layers.reload(model, folders[group.rank])
        else:
            tp_layers.load(Flux2Transformer2DModel, folders[group.rank], group=group)
    try:
        tp_layers.save(model, folders[0] / "again")
    except ValueError as problem:
        return str(error.value), str(problem)
    return str(error.value), ""


@pytest.mark.parametrize("again", [False, True], ids=["load", "reload"])
def test_ranks_that_read_other_values_are_refused(ranks, tmp_path, again):
    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        randomise(FAMILIES["Flux2Transformer2DModel"].build(), seed).save_pretrained(folder)
    for said, saving in ranks(2, same_layout, folders, again):
        assert "the ranks hold different values of" in said and ("of two checkpoints" in saving) == again


def nested(group: Group) -> str:
    """Rank 2 fails; the others hear of it by the alarm, one after the other."""
    alarm = Alarm(group)
    alarm._next = 0.0

    def work() -> None:
        if group.rank == 2:
            raise OSError("disk gone")
        while True:
            time.sleep(0.01)
            alarm.check()

    with pytest.raises((OSError, ValueError)) as error:
        agreed(group, work, alarm=alarm)
    return str(error.value)


def test_every_rank_is_told_by_the_one_it_happened_on(ranks):
    told = "rank 2 of 4 failed: OSError: disk gone"
    assert ranks(4, nested) == [told, told, "disk gone", told]


def imaginary(group: Group) -> str:
    """The ranks hold complex numbers that differ in their imaginary part alone."""
    with pytest.raises(ValueError) as error:
        require_equal({"x": torch.tensor([1 + 1j * group.rank])}, group)
    require_equal({"x": torch.tensor([1 + 1j])}, group)
    return str(error.value)


def test_complex_numbers_are_compared_whole(ranks):
    assert all("different values of 'x'" in said for said in ranks(2, imaginary))
