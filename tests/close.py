"""How far two results may be apart, and models whose numbers stay near 1."""

import torch
from torch import nn

# Relative error (norm of difference over norm) that float32 arithmetic in another order may reach.
FLOAT32 = 1e-6


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of `wanted`, in float64."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def nearly(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within what float32 arithmetic in another order may reach."""
    return relative_error(got, wanted) <= FLOAT32


def exactly(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in every element and in the dtype."""
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


def compare(results: list[tuple[list[torch.Tensor], int]], wanted: list[torch.Tensor]) -> float:
    """The largest error of rank 0's outputs; by the digests beside them, the ranks must have the same bits."""
    assert len({bits for _, bits in results}) == 1
    return max(relative_error(got, full) for got, full in zip(results[0][0], wanted, strict=True))


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draws every parameter, norms and biases too; weights by 1 / sqrt(fan in), so that activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                # A convolution's filter is of several dims.
                noise = (
                    noise / parameter[0].numel() ** 0.5 if parameter.dim() > 3 else noise / parameter.shape[-1] ** 0.5
                )
            elif name.endswith("weight"):
                noise = 1 + 0.3 * noise
            else:
                noise = 0.3 * noise
            parameter.copy_(noise)
    return model
