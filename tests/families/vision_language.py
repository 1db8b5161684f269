"""Models of text and images: Mistral 3, Gemma 3, Qwen2.5-VL, Qwen3-VL. Each prompt has an image of four tokens."""

import torch

from .decoders import decoder, gemma
from .decoders import prompt as text
from .family import Family, Values, noise

IMAGE = 50
# Of Gemma 3, whose vision tower has no rotary positions.
CANCELLED = r"vision_tower\..*k_proj\.bias"


def mistral3(heads: int) -> Values:
    vision = dict(
        model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads,
        head_dim=4, image_size=16, patch_size=2, num_channels=3,
    )  # fmt: skip
    text = decoder(heads) | dict(model_type="mistral")
    return dict(text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=True)


def gemma3(heads: int) -> Values:
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads, image_size=8,
        patch_size=2, vision_use_head=False,
    )  # fmt: skip
    text = gemma(heads)
    return dict(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE)


def qwen_text(heads: int) -> Values:
    # The older attention takes the head's width from the hidden size.
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 2, 2])
    return decoder(heads) | dict(hidden_size=20 * heads, head_dim=10, rope_parameters=rope)


def qwen2_5_vl(heads: int) -> Values:
    # The first block attends within windows of two by two tokens, the second to all.
    vision = dict(
        depth=2, hidden_size=8 * heads, intermediate_size=12 * heads, num_heads=heads, out_hidden_size=20 * heads,
        patch_size=2, in_channels=3, fullatt_block_indexes=[1], window_size=4, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    return dict(
        text_config=qwen_text(heads), vision_config=vision, image_token_id=IMAGE, video_token_id=51,
        vision_start_token_id=52, vision_end_token_id=53, tie_word_embeddings=False,
    )  # fmt: skip


def qwen3_vl(heads: int) -> Values:
    vision = dict(
        depth=2, hidden_size=8 * heads, intermediate_size=12 * heads, num_heads=heads, out_hidden_size=20 * heads,
        patch_size=2, in_channels=3, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )  # fmt: skip
    return dict(
        attn_implementation="eager",
        text_config=qwen_text(heads), vision_config=vision, image_token_id=IMAGE, video_token_id=51,
        vision_start_token_id=52, vision_end_token_id=53, tie_word_embeddings=True,
    )  # fmt: skip


def prompt() -> Values:
    rows = [[3, 52, IMAGE, IMAGE, IMAGE, IMAGE, 53, 17], [9, 14, 30, 2, 44, 28, 0, 0]]
    ids = torch.tensor(rows)
    return dict(
        input_ids=ids, attention_mask=(ids != 0).long(), output_hidden_states=True, use_cache=False,
    )  # fmt: skip


def image_types() -> torch.Tensor:
    return (prompt()["input_ids"] == IMAGE).long()


def mistral3_inputs() -> Values:
    return prompt() | dict(pixel_values=noise(1, 3, 8, 8), image_sizes=torch.tensor([[8, 8]]))


def gemma3_inputs() -> Values:
    return prompt() | dict(pixel_values=noise(1, 3, 8, 8), token_type_ids=image_types())


def qwen_inputs() -> Values:
    # Four by four patches, of two frames each.
    patches = noise(16, 3 * 2 * 2 * 2)
    return prompt() | dict(
        pixel_values=patches, image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=image_types()
    )


MODELS = [
    ("Mistral3", "Mistral3Config", mistral3, mistral3_inputs),
    ("Gemma3", "Gemma3Config", gemma3, gemma3_inputs),
    ("Qwen2_5_VL", "Qwen2_5_VLConfig", qwen2_5_vl, qwen_inputs),
    ("Qwen3VL", "Qwen3VLConfig", qwen3_vl, qwen_inputs),
]
FAMILIES = [
    Family(f"{name}{kind}", config, inputs, cancelled=CANCELLED, config_class=config_class)
    for name, config_class, config, inputs in MODELS
    for kind in ("Model", "ForConditionalGeneration")
]
FAMILIES += [
    Family(f"{name}TextModel", qwen_text, text, config_class=f"{name}TextConfig") for name in ("Qwen2_5_VL", "Qwen3VL")
]
