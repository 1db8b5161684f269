"""`examples/flux2.py` under torchrun, on a tiny pipeline's folder: by both its ways the picture of one process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from tiny_pipelines import flux2

ROOT = Path(__file__).parents[1]
PROMPT = "the red house in rain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny FLUX.2."""
    made = tmp_path_factory.mktemp("flux2")
    flux2.save(made)
    return made


@pytest.fixture(scope="module")
def wanted():
    """The picture that one process draws with the full pipeline, by diffusers alone."""
    pipeline, generator = flux2.build(), torch.Generator().manual_seed(3)
    image = pipeline(prompt=PROMPT, num_inference_steps=2, height=32, width=32, generator=generator).images[0]
    return numpy.asarray(image).astype(int)


WAYS = [
    pytest.param([], id="tp_layers.load"),
    pytest.param(["--diffusers"], id="diffusers' own call", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_draw_the_picture_of_one_process(folder, wanted, tmp_path, way):
    output = tmp_path / "picture.png"
    options = ["--prompt", PROMPT, "--steps", "2", "--size", "32", "--seed", "3", "--dtype", "float32"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, ROOT / "examples" / "flux2.py", folder, *options, "--output", output, *way],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith(f"saved {output}; ")]
    full = sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
    assert 0.4 * full < float(told.split()[-2]) * 1e9 < 0.7 * full
    found = numpy.asarray(Image.open(output)).astype(int)
    assert found.shape == wanted.shape and found.std() > 10
    assert abs(found - wanted).max() <= 1
