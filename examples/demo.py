"""Writes a FLUX.2 checkpoint with random weights, denoises with it on two CPU ranks and on one, and compares.

Exits with 1 if the two ranks' picture is further from a float32 one than twice the distance of one rank's, which is
what rounding in another order explains. Then draws digits with a small trained model into `demo.png`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel

import digits
from ranks import run

DENOISE = Path(__file__).with_name("denoise.py")
RANKS = 2
CONFIG = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 16,
    "joint_attention_dim": 512,
    "axes_dims_rope": (16, 16, 16, 16),
}


def write_checkpoint(folder: Path) -> None:
    """The real class in bfloat16, a few hundred MB in several files."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Flux2Transformer2DModel(**CONFIG).save_pretrained(folder, max_shard_size="100MB")
    torch.set_default_dtype(torch.float32)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of `wanted`."""
    return float((got - wanted).norm() / wanted.norm())


def print_table(rows: dict[str, dict[str, Any]], reference: torch.Tensor) -> None:
    """One line a rank, sizes in MB."""
    titles = ("", "weights held", "of the model", "read from disk", "peak memory", "load time", "from one rank")
    print(("{:<14}" + "{:>16}" * 6).format(*titles))
    for name, row in rows.items():
        cells = (
            f"{row['held'] / 1e6:.1f} MB",
            f"{row['held'] / row['full']:.1%}",
            f"{row['read'] / 1e6:.1f} MB",
            f"{row['peak'] / 1e6:.1f} MB",
            f"{row['seconds']:.2f} s",
            f"{relative_error(row['latents'], reference):.1e}",
        )
        print(("{:<14}" + "{:>16}" * 6).format(name, *cells))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tp_layers_demo_") as scratch:
        checkpoint = Path(scratch) / "transformer"
        print("writing a FLUX.2 checkpoint ...", flush=True)
        write_checkpoint(checkpoint)
        files = sorted(checkpoint.glob("*.safetensors"))
        print(f"  {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
        print(f"denoising on {RANKS} ranks, on one, and on one in float32 ...", flush=True)
        several = run(DENOISE, Path(scratch) / "several", RANKS, str(checkpoint))
        one = run(DENOISE, Path(scratch) / "one", 1, str(checkpoint))[0]
        exact = run(DENOISE, Path(scratch) / "exact", 1, "--dtype", "float32", str(checkpoint))[0]["latents"]
    print()
    print_table(
        {f"rank {rank} of {RANKS}": row for rank, row in enumerate(several)} | {"one rank": one}, one["latents"]
    )
    own = relative_error(one["latents"], exact)
    worst = max(relative_error(row["latents"], exact) for row in several)
    same = all(torch.equal(row["latents"], several[0]["latents"]) for row in several)
    print(f"\ndistance from float32: one rank {own:.1e}, {RANKS} ranks {worst:.1e} (bound {2 * own:.1e})")
    print(f"the ranks' pictures are {'bit-identical' if same else 'DIFFERENT'}")
    right = worst <= 2 * own and same
    print("right" if right else "WRONG: further off than rounding explains")
    print()
    return digits.main() or int(not right)


if __name__ == "__main__":
    sys.exit(main())
