"""A FLUX.2 pipeline of tiny components, nothing is downloaded.

The parameters of its transformer and text encoder are drawn, so that the picture depends on each of them.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from close import randomise

WORDS = ("a", "at", "cat", "dawn", "dog", "house", "in", "lighthouse", "of", "rain", "red", "the")
# The parts of a message are text alone.
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }} "
    "{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endfor %}"
)
HIDDEN = 16
# The pipeline takes the hidden states after layers 10, 20 and 30.
LAYERS = 30


def tokenizer() -> PreTrainedTokenizerFast:
    """Knows `WORDS`; every other word is unknown to it."""
    names = {name: f"<{name.removesuffix('_token')}>" for name in ("pad_token", "unk_token")}
    vocabulary = {word: number for number, word in enumerate([*names.values(), "<s>", *WORDS])}
    made = Tokenizer(WordLevel(vocabulary, unk_token=names["unk_token"]))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, padding_side="left", **names)


def text_encoder() -> Mistral3ForConditionalGeneration:
    text = dict(
        model_type="mistral", vocab_size=32, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    vision = dict(
        model_type="pixtral", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return randomise(Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))).eval()


def transformer() -> Flux2Transformer2DModel:
    model = Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=3 * HIDDEN, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return randomise(model).eval()


def vae() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=1, sample_size=32,
    ).eval()  # fmt: skip


def build() -> Flux2Pipeline:
    """The pipeline, the same each time, on the CPU in float32; a picture's sides are multiples of 4 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            transformer=transformer(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save(folder: Path) -> None:
    """Writes the pipeline's folder, its transformer in several files."""
    build().save_pretrained(folder, max_shard_size="100KB")
