"""`tp-layers load | save | describe` of checkpoints: of both libraries, with a plan, a variant, whole and sharded."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import T5Config, T5EncoderModel

from checkpoints import identical, state_of
from close import randomise
from families import FAMILIES
from tp_layers.cli import LIMIT_SECONDS, main
from tp_layers.group import Group
from tp_layers.launch import RankError, Ranks
from tp_layers.loader.snapshot import read_snapshot

PLAN = '''"""A plan."""
PLAN = {"encoder.block.*.layer.1.DenseReluDense.wi": "colwise", "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise"}
'''


@pytest.fixture(scope="module")
def flux(tmp_path_factory) -> Path:
    """The folder of a tiny pipeline, with its transformer in two variants."""
    folder = tmp_path_factory.mktemp("pipeline")
    model = FAMILIES["Flux2Transformer2DModel"].build(dtype=torch.bfloat16)
    model.save_pretrained(folder / "transformer", variant="bf16")
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    """The folder of a tiny text encoder, and a plan beside it."""
    folder = tmp_path_factory.mktemp("t5")
    config = T5Config(d_model=16, d_kv=4, num_heads=4, num_layers=2, d_ff=32, vocab_size=20)
    randomise(T5EncoderModel(config)).save_pretrained(folder / "model")
    (folder / "own.py").write_text(PLAN)
    return folder


def test_a_trial_says_what_each_rank_held_read_and_took(flux, capsys):
    assert main(["load", str(flux), "--subfolder", "transformer", "--variant", "bf16", "--size", "2"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "rank",
        "held",
        "MB",
        "needed",
        "MB",
        "read",
        "MB",
        "peak",
        "MB",
        "seconds",
        "preparing",
        "reading",
        "GB/s",
    ]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    held, needed, read = (float(figure) for figure in rows[0].split()[1:4])
    assert 0 < held == needed <= read


def test_a_variant_that_is_not_there_is_told_at_once(flux, capsys):
    assert main(["load", str(flux), "--subfolder", "transformer", "--size", "2"]) == 2
    assert "variant='bf16'" in capsys.readouterr().err


def test_a_snapshot_is_written_and_made_whole_again(flux, tmp_path, capsys):
    shards, again = tmp_path / "shards", tmp_path / "again"
    how = ["--subfolder", "transformer", "--variant", "bf16", "--size", "2"]
    assert main(["save", str(flux), *how, str(shards), "--sharded"]) == 0
    assert main(["describe", str(shards), "--size", "4"]) == 0 and "Flux2Transformer2DModel" in capsys.readouterr().out
    assert len(list(shards.glob("tp_layers-*-of-00002.safetensors"))) == 2 and read_snapshot(shards)
    assert main(["save", str(shards), "--size", "1", str(again), "--max-shard-size", "100KB"]) == 0
    assert identical(state_of(again), state_of(flux / "transformer"))
    shutil.rmtree(shards)
    assert main(["save", str(flux), *how, str(shards), "--sharded", "--max-shard-size", "1GB"]) == 2
    assert "max_shard_size is for ordinary checkpoints" in capsys.readouterr().err and not shards.exists()


@pytest.mark.slow
def test_unequal_parts_are_asked_for(tmp_path, capsys):
    FAMILIES["Flux2Transformer2DModel"].build(3).save_pretrained(tmp_path / "full")
    where, plain = ["--size", "2"], ["describe", str(tmp_path / "full")]
    for command in (plain, ["load", str(tmp_path / "full")], ["save", str(tmp_path / "full"), str(tmp_path / "no")]):
        assert main([*command, *where]) == 2
        assert "sizes that work for this plan: 1, 3; uneven=True lets 2 ranks hold unequal" in capsys.readouterr().err
    assert main([*plain, *where, "--uneven"]) == 0
    assert "over 2 ranks (sizes that work: 1, 2, 3)" in (said := capsys.readouterr().out) and "largest rank " in said
    assert main(["load", str(tmp_path / "full"), *where, "--uneven"]) == 0
    held = [float(row.split()[1]) for row in capsys.readouterr().out.splitlines()[1:]]
    assert held[0] > held[1] > 0
    to = tmp_path / "shards", tmp_path / "again"
    assert main(["save", str(tmp_path / "full"), *where, "--uneven", "--sharded", str(to[0])]) == 0
    assert main(["save", str(to[0]), "--size", "1", str(to[1])]) == 0
    assert identical(state_of(to[1]), state_of(tmp_path / "full"))


@pytest.mark.parametrize(
    "plan", ["", pytest.param("own.py:PLAN", marks=pytest.mark.slow)], ids=["its own plan", "the caller's plan"]
)
def test_a_text_encoder_is_loaded_and_saved(t5, tmp_path, plan):
    options = ["--size", "2", *(["--plan", str(t5 / plan)] if plan else [])]
    assert main(["load", str(t5 / "model"), *options]) == 0
    assert main(["save", str(t5 / "model"), *options, str(tmp_path / "again")]) == 0
    assert identical(state_of(tmp_path / "again"), state_of(t5 / "model"))


def test_a_revision_of_a_folder_and_a_config_of_nobody_are_told(flux, tmp_path, capsys):
    assert main(["load", str(flux), "--revision", "main", "--size", "2"]) == 2
    assert "revision='main' is for the id of a repository" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["load", str(tmp_path), "--size", "2"]) == 2
    assert "names neither a _class_name nor architectures" in capsys.readouterr().err


class Started(Exception):
    """Processes would have been started."""


@pytest.fixture
def started(monkeypatch):
    """Raises instead of starting processes, and gives the timeouts that were asked for."""
    timeouts = []

    def start(size, *, timeout=None):
        timeouts.append(timeout)
        raise Started

    monkeypatch.setattr("tp_layers.cli.Ranks", start)
    return timeouts


def test_a_limit_for_a_snapshot_is_refused_before_a_process_is_started(flux, tmp_path, started, capsys):
    where = [str(flux), "--subfolder", "transformer", "--variant", "bf16", "--size", "2", str(tmp_path / "new")]
    assert main(["save", *where, "--sharded", "--max-shard-size", "1GB"]) == 2
    assert "max_shard_size is for ordinary checkpoints" in capsys.readouterr().err
    assert main(["save", *where, "--max-shard-size", "lots"]) == 2
    assert "max_shard_size must be a number of bytes" in capsys.readouterr().err and not started


@pytest.mark.parametrize("command", ["load", "save"])
def test_a_long_trial_is_not_ended(flux, tmp_path, started, command):
    to = [str(tmp_path / "new")] if command == "save" else []
    with pytest.raises(Started):
        main([command, str(flux), "--subfolder", "transformer", "--variant", "bf16", "--size", "2", *to])
    assert started == [LIMIT_SECONDS] and LIMIT_SECONDS >= 3600


def die(group: Group) -> None:
    if group.rank == 1:
        os._exit(3)
    dist.barrier(group=group.process_group)


def test_a_process_that_dies_is_noticed_long_before_the_limit():
    start = time.monotonic()
    with Ranks(2, timeout=LIMIT_SECONDS) as ranks, pytest.raises(RankError, match="the process died"):
        ranks.run(die)
    assert time.monotonic() - start < 60
