"""`reload`: another checkpoint's weights in a sharded model, in the memory it has, or nothing changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tp_layers
from checkpoints import CLASSES, state_of
from close import randomise
from families import FAMILIES, run
from memory import Live
from refused import refused
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.read import Job, Reader
from tp_layers.loader.staging import STAGE_BYTES
from tp_layers.plans.shard import sharding_of

ONE = Group()
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def toys(tmp_path) -> tuple[Path, Path]:
    """The folders of two `Toy`s of other weights."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
        state = save_toy(folder)
    save_file({name: tensor.flip(0) - 2 for name, tensor in state.items()}, folders[1] / FILE)
    return folders


def right(model: nn.Module, full: dict[str, torch.Tensor]) -> bool:
    """Whether the model holds its shards of `full`, in its own dtypes."""
    sharding, state = sharding_of(model), model.state_dict()
    for name, tensor in full.items():
        spec = sharding.resolved.specs.get(name)
        wanted = tensor if spec is None else spec.take(tensor, sharding.group.rank, sharding.group.size)
        if not torch.equal(state[name], wanted.to(state[name].dtype)):
            return False
    return True


def swap(group: Group, name: str, first: Path, second: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """A model of one checkpoint reloaded from the other, and a fresh one of the other."""
    model = tp_layers.load(CLASSES[name], first, group=group, dtype=dtype)
    before = {key: (id(tensor), tensor.data_ptr()) for key, tensor in model.state_dict(keep_vars=True).items()}
    returned, report = tp_layers.reload(model, second, report=True)
    after = {key: (id(tensor), tensor.data_ptr()) for key, tensor in model.state_dict(keep_vars=True).items()}
    fresh, loading = tp_layers.load(CLASSES[name], second, group=group, dtype=dtype, report=True)
    inputs = FAMILIES[name].inputs()

    def output() -> list[torch.Tensor]:
        return run(model, inputs, dtype)

    return {
        "same": returned is model and before == after and right(model, state_of(second)),
        "read": (report.bytes_read, report.bytes_held) == (loading.bytes_read, loading.bytes_held),
        "equal": all(torch.equal(a, b) for a, b in zip(output(), run(fresh, inputs, dtype), strict=True)),
        "moved": not torch.equal(output()[0], run(tp_layers.reload(model, first), inputs, dtype)[0]),
        "name": model.config._name_or_path == str(first),
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "bfloat16 from float32"])
@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
@pytest.mark.parametrize("size", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def test_a_reloaded_model_is_the_other_one_in_the_same_memory(ranks, tmp_path, name, size, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    FAMILIES[name].build().save_pretrained(first)
    randomise(FAMILIES[name].build(), seed=7).save_pretrained(second, max_shard_size="100KB")
    for result in ranks(size, swap, name, first, second, dtype):
        assert result == dict.fromkeys(result, True)


def test_every_kind_of_tensor_is_replaced(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    parameters, rope = dict(model.named_parameters()), [table.clone() for table in model.rope]
    assert tp_layers.reload(model, toys[1]) is model and right(model, state_of(toys[1]))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.embed.weight is model.head.weight and not model.shift.requires_grad and model.up.weight.requires_grad
    assert all(torch.equal(table, kept) for table, kept in zip(model.rope, rope, strict=True))
    assert model.config._name_or_path == str(toys[1])


def test_a_model_sharded_by_apply_and_a_compiled_one(toys):
    model = tp_layers.apply(randomise(Toy(), seed=5), PLAN, group=ONE)
    compiled = torch.compile(model, backend="eager")
    x, before = torch.ones(2, 6), compiled(torch.ones(2, 6))
    assert tp_layers.reload(compiled, toys[1]) is compiled and right(model, state_of(toys[1]))
    fresh = tp_layers.load(Toy, toys[1], plan=PLAN, group=ONE)
    assert torch.equal(compiled(x), fresh(x)) and not torch.equal(before, fresh(x))


def test_an_optimiser_goes_on_with_the_new_values(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    tp_layers.reload(model, toys[1])
    model(torch.ones(2, 6)).sum().backward()
    wanted = model.up.weight.detach() - 0.5 * model.up.weight.grad
    optimiser.step()
    assert torch.equal(model.up.weight, wanted)


def test_no_tensor_beside_the_model(tmp_path):
    save_toy(tmp_path, width=256, hidden=512)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=Group(0, 2))
    with Live() as live:
        tp_layers.reload(model, tmp_path)
    # Samples of what is whole, which the ranks compare.
    assert live.peak < 4096
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=Group(0, 2), dtype=torch.bfloat16)
    with Live() as live:
        tp_layers.reload(model, tmp_path)
    assert live.peak <= STAGE_BYTES


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


def test_a_plain_module_is_reloaded_too(tmp_path):
    plan = {"0": "colwise", "1": "rowwise"}

    def pair(seed: int) -> nn.Sequential:
        return randomise(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), seed)

    other = tp_layers.apply(pair(3), plan, group=ONE)
    tp_layers.save(other, tmp_path)
    model = tp_layers.apply(pair(0), plan, group=ONE)
    assert torch.equal(tp_layers.reload(model, tmp_path)(torch.ones(1, 4)), other(torch.ones(1, 4)))


def test_a_subclass_takes_the_weights_of_its_base(toys):
    class Own(Toy):
        pass

    model = tp_layers.load(Own, toys[0], plan=PLAN, group=ONE)
    assert right(tp_layers.reload(model, toys[1]), state_of(toys[1]))


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
