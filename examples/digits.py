"""Draws digits on one CPU rank and on two, and with a plan that is wrong, side by side in one picture.

    python examples/digits.py [demo.png]

Exits with 1 if the two ranks' digits are a grey level off the one rank's, or if `verify` finds the wrong plan right.
"""

import sys
import tempfile
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from PIL import Image, ImageDraw, ImageFont

import tp_layers
from draw import CLASSES, FOLDER, PATCH, SIDE, conditions, wrong_plan
from ranks import run
from tp_layers.group import Group
from tp_layers.verify import Verification

DRAW = Path(__file__).with_name("draw.py")
RANKS = 2
GREY_LEVEL = 1 / 255
# Of the picture, in its own pixels: a digit's side, the space around it, and the height of a caption.
DIGIT, SPACE, CAPTION = 72, 12, 26


def compose(rows: dict[str, torch.Tensor]) -> Image.Image:
    """A picture of rows of small pictures `[10, 8, 8]` from 0 (black) to 1 (white), each below its caption."""
    line = CAPTION + DIGIT + 2 * SPACE
    sheet = Image.new("L", (CLASSES * (DIGIT + SPACE) + SPACE, len(rows) * line + SPACE), 224)
    writer, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=16)
    for number, (caption, digits) in enumerate(rows.items()):
        top = number * line + SPACE
        writer.text((SPACE, top), caption, fill=0, font=font)
        for place, digit in enumerate((digits.clamp(0, 1) * 255).round().byte()):
            large = Image.fromarray(digit.numpy()).resize((DIGIT, DIGIT), Image.Resampling.BICUBIC)
            sheet.paste(large, (SPACE + place * (DIGIT + SPACE), top + CAPTION))
    return sheet


def find_fault(group: Group | None = None) -> Verification:
    """What `verify` says of the wrong plan, given random tokens; on ranks of its own, or on those of `group`."""
    model = FluxTransformer2DModel.from_pretrained(FOLDER, low_cpu_mem_usage=False).float()
    tokens = torch.randn(CLASSES, (SIDE // PATCH) ** 2, PATCH**2, generator=torch.Generator().manual_seed(0))
    inputs = {"hidden_states": tokens, "timestep": torch.full((CLASSES,), 0.5), **conditions(torch.arange(CLASSES))}
    return tp_layers.verify(model, inputs, wrong_plan(model), size=RANKS, group=group)


def main(path: Path = Path("demo.png")) -> int:
    """Writes the picture to `path`, prints how far its rows are apart, and returns the exit status."""
    print(f"drawing digits on {RANKS} ranks and on one ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="tp_layers_digits_") as scratch:
        several = run(DRAW, Path(scratch) / "several", RANKS)
        one = run(DRAW, Path(scratch) / "one", 1)[0]["digits"]
    differences = [(row["digits"] - one).abs() for row in several]
    apart = max(float(difference.max()) for difference in differences)
    wrong = several[0]["wrong"]
    off = float((wrong - one).abs().max())
    compose(
        {
            "drawn by one rank": 1 - one,
            f"drawn by {RANKS} ranks": 1 - several[0]["digits"],
            f"their difference (at most {apart:.0e}), times 255: one grey level would be white": (
                differences[0] / GREY_LEVEL
            ),
            f"drawn by {RANKS} ranks with a wrong plan, which takes an MLP for a gated one": 1 - wrong,
            f"its difference from the first row (at most {off:.2f}), as it is": (wrong - one).abs(),
        }
    ).save(path)
    fault = find_fault()
    print(f"{path}: {RANKS} ranks' digits are within {apart:.0e} of one rank's, a wrong plan's up to {off:.2f} off")
    print(f"verify says of the wrong plan:\n{fault}")
    return 0 if apart < GREY_LEVEL and not fault.ok else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
