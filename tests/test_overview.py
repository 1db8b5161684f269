"""Published models by name, and the table of the docs."""

import re
from pathlib import Path

import pytest
import torch

import tp_layers
from tp_layers.cli import main
from tp_layers.overview import published, row
from tp_layers.plans.families import PLANS, PUBLISHED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
# Whose figures must be exact: the sums below do not come from describe.
EXACT = [
    "FLUX.1-dev", "FLUX.2-dev", "Qwen-Image", "Wan2.1-T2V-14B", "HunyuanVideo", "LTX-Video-13B", "SD3.5-large",
    "MiniMax-H3",
]  # fmt: skip


@pytest.mark.slow
def test_the_page_is_what_the_command_prints(capsys):
    assert main(["describe", "--all"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "run: tp-layers describe --all > docs/models.md"


@pytest.mark.parametrize("name", EXACT)
def test_the_row_is_current_and_the_bytes_of_a_rank_are_the_sum_over_the_parameters(name):
    model = published(name)
    size = 2 if name == "SD3.5-large" else 4
    whole = [*model.named_parameters(), *((key, it) for key, it in model.named_buffers() if key in model.state_dict())]
    before = {key: tensor.nbytes for key, tensor in whole}
    report = tp_layers.describe(model, size=size)
    assert report.full_bytes == sum(before.values())
    # What is really in a rank's hands after the plan has been carried out.
    sharded = tp_layers.apply(model, group=tp_layers.group.Group(size - 1, size))
    held = {key: tensor.nbytes for key, tensor in sharded.state_dict().items()}
    assert report.held_bytes == sum(held.values())
    assert {before[key] // held[key] for key in before} == {1, size}
    line = row(name)
    assert f" {report.held_bytes / 1e9:.2f} " in line
    assert line in PAGE.read_text().splitlines(), "run: tp-layers describe --all > docs/models.md"


def test_every_published_model_has_a_registered_class_and_a_figure():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert {cells[0].removeprefix("| ") for cells in rows} - {"---"} == set(PUBLISHED)
    assert {found for found, _ in PUBLISHED.values()} <= set(PLANS)


def test_weights_are_in_half_precision_but_for_those_kept():
    dtypes = {key: it.dtype for key, it in published("MiniMax-H3").named_parameters()}
    kept = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert kept and set(dtypes.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.slow
def test_no_registered_plan_forgets_a_large_weight():
    noted = {name: tp_layers.describe(published(name), size=2, check=False).notes for name in PUBLISHED}
    assert {name: notes for name, notes in noted.items() if notes} == {}


def test_a_name_is_described_like_its_class(capsys):
    assert main(["describe", "FLUX.1-dev", "--size", "4"]) == 0
    assert re.search(r"each rank holds  6\.\d\d GB, 25\.\d% of the model", capsys.readouterr().out)


def test_a_name_that_nobody_published_is_refused(capsys):
    with pytest.raises(ValueError, match=r"no published model is called 'FLUX.9'; there are .*FLUX\.1-dev"):
        published("FLUX.9")
    assert main(["describe", "FLUX.9", "--size", "2"]) == 2
    assert "neither a folder nor a model class" in capsys.readouterr().err


def test_all_takes_no_model(capsys):
    assert main(["describe", "--all", "FLUX.1-dev"]) == 2
    assert "describe --all is about all models: leave out 'FLUX.1-dev'" in capsys.readouterr().err
