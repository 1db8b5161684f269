"""Text encoders, tokenizers and decoders of a few thousand parameters, from which whole pipelines are put together."""

import string
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn

from close import randomise
from text_models import CLIP, T5, TEXT, qwen_vl

transformers.logging.set_verbosity_error()


def tokenizer(length: int = 16) -> Any:
    """A token for each small letter, and one for all else: published templates become long enough to be cut."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {letter: number for number, letter in enumerate(string.ascii_lowercase, 4)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=length, **special)


def drawn(model: nn.Module, seed: int) -> Any:
    """`model` with every parameter drawn, in eval mode."""
    return randomise(model, seed).eval()


def t5(width: int = 16, cls: str = "T5", seed: int = 1) -> Any:
    config = dict(T5, d_model=width, feed_forward_proj="gated-gelu")
    return drawn(getattr(transformers, f"{cls}EncoderModel")(getattr(transformers, f"{cls}Config")(**config)), seed)


def clip(cls: str = "CLIPTextModel", seed: int = 2, **different: Any) -> Any:
    return drawn(getattr(transformers, cls)(transformers.CLIPTextConfig(**{**CLIP, **different})), seed)


def llama() -> Any:
    return drawn(transformers.LlamaModel(transformers.LlamaConfig(**dict(TEXT, num_hidden_layers=3))), 3)


def qwen() -> Any:
    return drawn(transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**qwen_vl())), 4)


def vae(cls: str, seed: int = 5, **config: Any) -> Any:
    return drawn(getattr(diffusers, cls)(**config), seed)


def transformer(cls: str, seed: int = 6, **config: Any) -> Any:
    return drawn(getattr(diffusers, cls)(**config), seed)


def flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
