"""The progress bar of `load` counts this rank's bytes, on rank 0 alone, and nothing needs it."""

import io
import sys

import pytest
from diffusers import Flux2Transformer2DModel

import tp_layers
from families import FAMILIES
from tp_layers.group import Group
from tp_layers.loader.progress import progress


class Terminal(io.StringIO):
    """What tqdm takes for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path):
    FAMILIES["Flux2Transformer2DModel"].build().save_pretrained(tmp_path)
    return tmp_path


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, group: Group, folder) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    _, report = tp_layers.load(Flux2Transformer2DModel, folder, group=group, device="cpu", report=True)
    assert report.bytes_held > 0
    return stream.getvalue()


def test_rank_zero_counts_to_the_end_on_a_terminal(monkeypatch, folder):
    text = shown(monkeypatch, Terminal(), Group(0, 2), folder)
    assert "loading this rank's shards" in text and "100%" in text


@pytest.mark.parametrize(("stream", "rank"), [(Terminal(), 1), (io.StringIO(), 0)], ids=["another rank", "no terminal"])
def test_silent_elsewhere(monkeypatch, folder, stream, rank):
    assert shown(monkeypatch, stream, Group(rank, 2), folder) == ""


def test_without_tqdm_the_model_is_loaded_all_the_same(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert shown(monkeypatch, Terminal(), Group(), folder) == ""
    with progress(3, Group()) as done:
        done(3)


def test_the_bar_ends_at_the_bytes_the_rank_reads(monkeypatch, folder):
    counted = []
    monkeypatch.setattr("tqdm.tqdm.update", lambda bar, count: counted.append((bar.total, count)))
    monkeypatch.setattr(sys, "stderr", Terminal())
    for rank in (1, 0):
        counted.clear()
        _, report = tp_layers.load(Flux2Transformer2DModel, folder, group=Group(rank, 2), device="cpu", report=True)
        assert {total for total, _ in counted} == {report.bytes_read} == {sum(count for _, count in counted)}
