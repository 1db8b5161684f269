"""Rates by name and measured, and what the command prints and refuses."""

import math
import re
from dataclasses import replace

import pytest
import torch

from tp_layers import cli_estimate, hardware
from tp_layers.cli import main
from tp_layers.group import Group
from tp_layers.hardware import HARDWARE, Hardware, measured, measured_on, named
from tp_layers.rates import Rates

FLUX = ["describe", "FLUX.1-dev", "--hardware", "H200", "--tokens", "4096"]


def test_rates_of_a_node_and_of_several():
    it = Hardware("x", 1e9, 2e12, 1e9, 8, 1e-5, 1e9, 2e-5, 1e8)
    assert it.rates(1) == Rates(2e12, 0.0, math.inf)
    assert it.rates(2) == Rates(2e12, 1e-5, pytest.approx(1e9))
    assert it.rates(8).transfer == pytest.approx(1e9 / 1.75)
    # 1.75 bytes over a link of the node, and one over the network between two.
    assert it.rates(16) == Rates(2e12, pytest.approx(3e-5), pytest.approx(1 / (1.75e-9 + 1e-8)))
    assert [it.nodes(size) for size in (1, 8, 9, 16, 24)] == [1, 1, 2, 2, 3]


def test_known_hardware_is_plausible():
    assert named("h100") is HARDWARE["H100"] and named("RTX4090").per_node == 4
    for it in HARDWARE.values():
        assert 1e13 < it.flops < 3e15 and 1e10 < it.memory < 3e11 and it.link < it.bandwidth < it.flops
        assert it.rates(2 * it.per_node).transfer < it.rates(it.per_node).transfer < it.rates(2).transfer


def test_ranks_are_measured(ranks):
    for size in (1, 2):
        it = ranks(size, measured_on, torch.float32)[0]
        assert it.dtypes == (torch.float32,) and it.nodes(size) == 1 and it.memory > 1e8
        assert 1e8 < it.flops < 1e13 and 1e7 < it.bandwidth < 1e13
    assert it.rates(1).transfer == math.inf and 0 < it.latency < 1
    assert 1e6 < it.rates(2).transfer == pytest.approx(it.link)


def test_measured_rates_come_back_as_they_were(monkeypatch):
    rates = Rates(3e9, 2e-4, 5e8, weights=2e9, hidden=0.7, further=1e-4)
    monkeypatch.setattr(hardware, "measure", lambda *_, **how: rates)
    monkeypatch.setattr(hardware, "_bandwidth", lambda *_: 1e9)
    for size in (2, 3, 4):
        found = measured_on(Group(0, size), torch.float32).rates(size)
        assert found == replace(rates, transfer=pytest.approx(5e8))


def test_a_process_group_measures_itself(ranks):
    # Of four ranks that there are, all call it.
    found = ranks(4, sizes_measured)
    assert found == [[1, 2], [2], [], []]


def sizes_measured(group):
    return sorted(measured([1, 2], torch.float32))


def too_many(group):
    measured([1, 8], torch.float32)


def test_more_ranks_than_the_group_has_are_refused(ranks):
    with pytest.raises(Exception, match="8 ranks cannot be measured, there are 4"):
        ranks(4, too_many)


def test_the_table(capsys):
    assert main([*FLUX, "--text-tokens", "512"]) == 0
    title, header, *rows, left_out = capsys.readouterr().out.splitlines()
    assert title == "FluxTransformer2DModel on H200: a step of 4096 image and 512 text tokens, estimated"
    assert header.split()[:4] == ["ranks", "nodes", "step", "ms"] and left_out.startswith("left out:")
    cells = [re.split(r"\s+", row.strip(), maxsplit=8) for row in rows]
    assert [(row[0], row[1], row[-1]) for row in cells] == [
        ("1", "1", "fits"), ("2", "1", "fits"), ("4", "1", "fits"), ("8", "1", "fastest"),
    ]  # fmt: skip
    for _, _, step, gemms, attention, collectives, hideable, held, _ in cells:
        assert float(step) == pytest.approx(float(gemms) + float(attention) + float(collectives), abs=0.02)
        assert float(hideable) <= float(collectives) and 3 < float(held) < 24


def test_one_size_and_uneven_parts(capsys):
    assert main([*FLUX, "--size", "4"]) == 0
    assert "4096 image tokens, without text" in (said := capsys.readouterr().out) and len(said.splitlines()) == 4
    assert main([*FLUX, "--size", "5"]) == 2 and "sizes that work" in capsys.readouterr().err
    assert main([*FLUX, "--size", "5", "--uneven"]) == 0 and "  5     1 " in capsys.readouterr().out


def test_a_small_gpu_does_not_fit(capsys):
    assert main(["describe", "Qwen-Image", "--hardware", "rtx4090", "--tokens", "4096", "--size", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("does not fit")


def test_measured_rates_are_of_the_models_dtype_and_of_cores_that_are_there(capsys, monkeypatch):
    asked = []

    def rates(sizes, dtype):
        asked.append((sizes, dtype))
        return {size: Hardware("here", 1e12, 1e9, 1e9, size, 0.0, 1e9, 0.0, 1e9, (dtype,)) for size in sizes}

    monkeypatch.setattr(cli_estimate, "measured", rates)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    for extra, wanted in ([], ([1, 2], torch.bfloat16)), (["--size", "4", "--dtype", "float32"], ([4], torch.float32)):
        assert main(["describe", "FLUX.1-dev", "--hardware", "measured", "--tokens", "64", *extra]) == 0
        assert asked.pop() == wanted and "on here" in capsys.readouterr().out
    assert main(["describe", "FLUX.1-dev", "--hardware", "measured", "--tokens", "64", "--size", "5"]) == 2
    assert not asked, "nothing is measured for a size that does not work"


REFUSED = {
    "no tokens": (["FLUX.1-dev", "--hardware", "H200"], "--hardware needs --tokens"),
    "no hardware": (["FLUX.1-dev", "--size", "2", "--tokens", "9"], "leave out --tokens"),
    "text without hardware": (["FLUX.1-dev", "--size", "2", "--text-tokens", "9"], "leave out --text-tokens"),
    "an unknown one": (["FLUX.1-dev", "--hardware", "V9", "--tokens", "9"], "called 'V9'; there are A100"),
    "no model": (["--hardware", "H200", "--tokens", "9"], "describe needs FOLDER|CLASS|NAME"),
    "no rows": (["FLUX.1-dev", "--hardware", "H200", "--tokens", "0"], "--tokens must be at least 1"),
    "less than no text": ([*FLUX[1:], "--text-tokens", "-1"], "not negative"),
    "all models": (["--all", "--hardware", "H200"], "leave out --hardware"),
    "kernels": (["--kernels", "--tokens", "9"], "leave out --tokens"),
    "another dtype": ([*FLUX[1:], "--dtype", "float32"], "these rates are of bfloat16 or float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(capsys, case):
    arguments, said = REFUSED[case]
    assert main(["describe", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out
