"""AnyFlow: bidirectional; and causal, all frames at once and a chunk at a time."""

from typing import Any

import diffusers
import torch

from .family import Family, Values, noise


def anyflow(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=6, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=heads * 10, num_layers=2, rope_max_seq_len=16, image_dim=20,
    )  # fmt: skip


def far(heads: int) -> Values:
    return anyflow(heads) | dict(full_chunk_limit=2)


def inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 6, 4, 8), timestep=torch.tensor([[300, 500, 700]] * 2),
        r_timestep=torch.tensor([[100, 200, 400]] * 2), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_hidden_states_image=noise(2, 3, 20, seed=3),
    )  # fmt: skip


def far_inputs() -> Values:
    # Three chunks, of which the first is compressed.
    return inputs() | dict(chunk_partition=[1, 1, 1])


class Chunks(diffusers.AnyFlowFARTransformer3DModel):
    """Writes the first two chunks into a cache for its own heads, then denoises the third."""

    def forward(self, hidden_states: torch.Tensor, timestep: Any, r_timestep: Any, **kwargs: Any) -> Any:
        cache = [
            {
                "full_cache": torch.zeros(2, 2, block.attn1.heads, 16, 12),
                "compressed_cache": torch.zeros(2, 2, block.attn1.heads, 8, 12),
            }
            for block in self.blocks
        ]
        flag = {"num_cached_chunks": 2, "is_cache_step": True}
        super().forward(
            hidden_states[:, :2], timestep[:, :2], r_timestep[:, :2], chunk_partition=[1, 1], kv_cache=cache,
            kv_cache_flag=flag, **kwargs,
        )  # fmt: skip
        flag["is_cache_step"] = False
        return super().forward(
            hidden_states[:, 2:], timestep[:, 2:], r_timestep[:, 2:], chunk_partition=[1, 1, 1], kv_cache=cache,
            kv_cache_flag=flag, **kwargs,
        )[0]  # fmt: skip


FAMILIES = [
    Family("AnyFlowTransformer3DModel", anyflow, inputs),
    Family("AnyFlowFARTransformer3DModel", far, far_inputs, "all at once"),
    Family("AnyFlowFARTransformer3DModel", far, inputs, "a chunk at a time", model=Chunks),
]
