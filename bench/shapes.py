"""The layers of four models, on one rank, in the order in which they are worth measuring."""

from typing import NamedTuple

# The most telling first: at size 4 a rank's GEMM is as long as its all-reduce.
SIZES = (4, 1, 8, 2)
# An image with its text, the text, the image, the two rows of a modulation under classifier-free guidance.
IMAGE = (4608, 512, 4096, 2)
VIDEO = (32768, *IMAGE)


class Case(NamedTuple):
    """One operation on one rank.

    `depths` are the widths of its inputs, `widths` those of its output's blocks; both blocks of a gated projection,
    none for a norm. The activation is that of the last block, or of the gate.
    """

    model: str
    layer: str
    operation: str
    size: int
    tokens: int
    depths: tuple[int, ...]
    widths: tuple[int, ...] = ()
    activation: str | None = None

    @property
    def flops(self) -> int:
        """Operations of the GEMM; a norm's are not what bounds it."""
        return 2 * self.tokens * sum(self.depths) * sum(self.widths)

    def nbytes(self, itemsize: int) -> int:
        """The least that passes through memory: each input read once, each output written once."""
        depth, width = sum(self.depths), sum(self.widths)
        written = {
            "sum_of_squares": 4 * self.tokens,
            "scale": self.tokens * depth * itemsize,
            "gated_colwise": self.tokens * width // 2 * itemsize,
        }
        read = (self.tokens * depth + depth * width) * itemsize
        return read + written.get(self.operation, self.tokens * width * itemsize)

    def tiny(self) -> "Case":
        """The same case at a size for Triton's interpreter: as many inputs and blocks, none of them even."""
        return self._replace(
            tokens=min(self.tokens, 37),
            depths=tuple(40 + 8 * at for at in range(len(self.depths))),
            widths=(48,) * len(self.widths)
            if self.operation == "gated_colwise"
            else (40, 48, 72, 24, 24)[: len(self.widths)],
        )


class Layer(NamedTuple):
    """A layer of a model before it is sharded."""

    model: str
    name: str
    operation: str
    depths: tuple[int, ...]
    widths: tuple[int, ...] = ()
    activation: str | None = None
    tokens: tuple[int, ...] = IMAGE

    def on(self, size: int, tokens: int) -> Case:
        """One rank's part: rowwise layers and norms are cut along their inputs, colwise ones along their outputs."""
        colwise = self.operation.endswith("colwise")
        depths = self.depths if colwise else tuple(depth // size for depth in self.depths)
        widths = tuple(width // size for width in self.widths) if colwise else self.widths
        return Case(self.model, self.name, self.operation, size, tokens, depths, widths, self.activation)


# FLUX.1 and Qwen-Image have the same width, heads and MLP; only FLUX.1 has single blocks.
BOTH = "FLUX.1, Qwen-Image"
GELU = "gelu_tanh"
LAYERS = (
    Layer("FLUX.1", "single proj_out", "packed_rowwise", (3072, 12288), (3072,)),
    Layer("FLUX.1", "single q|k|v|mlp", "packed_colwise", (3072,), (3072, 3072, 3072, 12288), GELU),
    Layer("FLUX.2", "single gate|up", "gated_colwise", (6144,), (18432, 18432), "silu"),
    Layer(BOTH, "ff out", "rowwise", (12288,), (3072,)),
    Layer(BOTH, "ff in", "packed_colwise", (3072,), (12288,), GELU),
    Layer(BOTH, "attn to_q", "colwise", (3072,), (3072,)),
    Layer("Wan", "attn norm_q", "sum_of_squares", (5120,), tokens=VIDEO),
    Layer("Wan", "attn norm_q", "scale", (5120,), tokens=VIDEO),
    Layer("FLUX.2", "single to_out", "packed_rowwise", (6144, 18432), (6144,)),
    Layer("FLUX.2", "single q|k|v|gate|up", "packed_colwise", (6144,), (6144, 6144, 6144, 18432, 18432)),
    Layer("FLUX.2", "ff out", "rowwise", (18432,), (6144,)),
    Layer("FLUX.2", "attn to_q", "colwise", (6144,), (6144,)),
    Layer("FLUX.2", "attn to_out", "rowwise", (6144,), (6144,)),
    Layer(BOTH, "attn to_out", "rowwise", (3072,), (3072,)),
    Layer("Wan", "ffn in", "packed_colwise", (5120,), (13824,), GELU, VIDEO),
    Layer("Wan", "ffn out", "rowwise", (13824,), (5120,), tokens=VIDEO),
    Layer("Wan", "attn to_q", "colwise", (5120,), (5120,), tokens=VIDEO),
    Layer("Wan", "attn to_out", "rowwise", (5120,), (5120,), tokens=VIDEO),
)


def cases() -> list[Case]:
    """Every layer at every size and number of tokens: all layers at one of them before the next."""
    ranked = [
        (at_tokens + at_size, at_tokens, layer.on(size, tokens))
        for layer in LAYERS
        for at_tokens, tokens in enumerate(layer.tokens)
        for at_size, size in enumerate(SIZES)
    ]
    return [case for *_, case in sorted(ranked, key=lambda entry: entry[:2])]


def floor(case: Case, itemsize: int, flops_per_second: float, bytes_per_second: float) -> tuple[float, str]:
    """The least seconds the case can take at these roofs, and the roof that says so."""
    arithmetic = case.flops / flops_per_second
    memory = case.nbytes(itemsize) / bytes_per_second
    return (arithmetic, "matmul") if arithmetic > memory else (memory, "copy")
