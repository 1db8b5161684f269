"""`tp-layers describe --kernels`: what `backend="auto"` takes, without a model."""

import pytest
import torch

from tp_layers import windows
from tp_layers.cli import main
from tp_layers.kernels import backend, configs, measured


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    monkeypatch.setattr(measured, "FASTER", {})
    monkeypatch.setattr(windows, "WINDOWS", {})


def table(capsys, *arguments):
    assert main(["describe", "--kernels", *arguments]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == list(backend.Choice._fields)
    return title, [row.split(maxsplit=4) for row in rows]


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
def test_every_choice_is_a_line(capsys, monkeypatch, architecture):
    monkeypatch.setitem(measured.FASTER, (architecture, "rowwise", "long", "half"), "triton")
    title, rows = table(capsys, "--architecture", architecture)
    assert title.endswith(architecture)
    assert rows == [list(choice) for choice in backend.choices(architecture)]
    assert ["rowwise", "long", "half", "triton", "measured"] in rows


def test_measured_all_reduces_are_listed_after_them(capsys, monkeypatch):
    monkeypatch.setitem(windows.WINDOWS, ("NVIDIA H200", 8, "bfloat16"), ((8192, 65536, "one_shot"),))
    assert main(["describe", "--kernels"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "all-reduce of 8192 to 65536 bytes, NVIDIA H200, 8 ranks, bfloat16: one_shot"


def test_the_architecture_is_by_default_that_of_the_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert table(capsys)[0].endswith("sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert table(capsys)[0].endswith("sm_80")


@pytest.mark.parametrize("arguments", [[], ["--size", "2"], ["FluxTransformer2DModel"]], ids=["none", "size", "model"])
def test_a_model_and_a_size_are_needed_otherwise(capsys, arguments):
    assert main(["describe", *arguments]) == 2
    assert "needs FOLDER|CLASS|NAME and --size, or --all, or --kernels" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["describe", "--kernels", "--architecture", "sm_12"])
    assert "sm_90" in capsys.readouterr().err


IGNORED = {
    "a model": ["--kernels", "FluxTransformer2DModel"],
    "a size": ["--kernels", "--size", "2"],
    "a dtype": ["--kernels", "--dtype", "bfloat16"],
    "a plan": ["--kernels", "--plan", "own.py:PLAN"],
    "unequal parts": ["--kernels", "--uneven"],
    "a folder in a folder": ["--kernels", "--subfolder", "transformer"],
    "an architecture without kernels": ["FluxTransformer2DModel", "--size", "2", "--architecture", "sm_90"],
    "a variant of a class": ["FluxTransformer2DModel", "--size", "2", "--variant", "fp16"],
    "a folder in a class": ["FluxTransformer2DModel", "--size", "2", "--subfolder", "transformer"],
    "a revision of a class": ["FluxTransformer2DModel", "--size", "2", "--revision", "main"],
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_would_be_ignored_is_refused(capsys, case):
    assert main(["describe", *IGNORED[case]]) == 2
    told = capsys.readouterr()
    shown = [word for word in IGNORED[case] if word.startswith("--") and word != "--kernels"]
    assert f"leave out {shown[-1] if shown else repr(IGNORED[case][-1])}" in told.err and not told.out
