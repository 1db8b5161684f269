"""The examples run as they are, and the digits that they draw are digits."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

import tp_layers
from close import FLOAT32, relative_error
from tp_layers.group import Group
from tp_layers.verify import Verification

EXAMPLES = Path(__file__).parents[1] / "examples"


def script(name: str) -> ModuleType:
    """One of the examples, as a module; on ranks too."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.slow
def test_the_demo_finds_two_ranks_right_and_draws_digits(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "right" in lines and "the ranks' pictures are bit-identical" in lines
    held = [line.split() for line in lines if line.startswith("rank ")]
    assert len(held) == 2 and all(row[6] == "51.7%" for row in held)
    assert "FluxTransformer2DModel on 2 ranks: WRONG" in lines
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def drawn(group: Group, wrong: bool) -> torch.Tensor:
    draw = script("draw")
    model = FluxTransformer2DModel.from_pretrained(draw.FOLDER, low_cpu_mem_usage=False).float()
    plan = draw.wrong_plan(model) if wrong else None
    return draw.draw(tp_layers.apply(model, plan, group=group))


def fault(group: Group) -> Verification:
    return script("digits").find_fault(group)


@pytest.fixture(scope="module")
def one_rank() -> torch.Tensor:
    """The digits as one rank draws them."""
    return drawn(Group(), wrong=False)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_draw_the_digits_of_one(ranks, one_rank, size):
    several = ranks(size, drawn, False)
    assert all(torch.equal(digits, several[0]) for digits in several)
    assert (several[0] - one_rank).abs().max() < 1 / 255
    # Nor are they a blank sheet.
    assert one_rank.shape == (10, 8, 8) and one_rank.std() > 0.2


def on_axes(group: Group, way: str) -> torch.Tensor:
    axes = script("axes")
    return axes.draw(axes.WAYS[way](group.device), group.device)


@pytest.mark.parametrize("way", ["context", "guidance"])
def test_two_axes_of_a_mesh_draw_the_digits_of_one_rank(ranks, way):
    axes = script("axes")
    model = FluxTransformer2DModel.from_pretrained(axes.FOLDER, low_cpu_mem_usage=False).float()
    one = axes.draw(axes.in_one_batch(model), torch.device("cpu"))
    several = ranks(4, on_axes, way)
    assert all(torch.equal(digits, several[0]) for digits in several)
    assert relative_error(several[0], one) <= FLOAT32 and one.std() > 0.2


@pytest.mark.slow
def test_two_axes_of_a_mesh_run_under_torchrun():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, EXAMPLES / "axes.py"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("tp x ")]
    assert len(told) == 2 and all(line.endswith("from one rank, the ranks bit-identical") for line in told)


def test_a_wrong_plan_draws_other_digits_and_verify_says_where(ranks, one_rank):
    for digits in ranks(2, drawn, True):
        assert (digits - one_rank).abs().max() > 0.25
    (found, _) = ranks(2, fault)
    assert not found.ok and found.first_wrong.path == "single_transformer_blocks.0.proj_out"


def test_a_classifier_of_handwritten_digits_reads_them(one_rank):
    datasets, linear = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.linear_model")
    digits = datasets.load_digits()
    reader = linear.LogisticRegression(max_iter=300).fit(digits.data / 16, digits.target)
    read = reader.predict(one_rank.flatten(1).numpy())
    assert sum(read == range(10)) >= 9, read


def test_the_weights_in_the_repository_are_small():
    files = [path for path in (EXAMPLES / "digits").iterdir() if path.is_file()]
    assert sorted(path.name for path in files) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert sum(path.stat().st_size for path in files) < 3_000_000


def read_config(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def read_weights(path: Path) -> dict[str, object]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(path).items()}


def test_the_training_script_writes_such_a_model(tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, str(EXAMPLES / "train_digits.py"), str(tmp_path), "--steps", "2"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    for name, read in (("config.json", read_config), ("diffusion_pytorch_model.safetensors", read_weights)):
        assert read(tmp_path / name) == read(EXAMPLES / "digits" / name)


def test_a_picture_has_every_row_of_digits():
    digits = script("digits")
    picture = digits.compose({"white": torch.ones(10, 8, 8), "black": torch.zeros(10, 8, 8)})
    rows = [picture.getpixel((60, digits.SPACE + digits.CAPTION + at)) for at in (30, 30 + picture.height // 2)]
    assert rows == [255, 0]
