"""Families of Transformers, built tiny from their configuration, against the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import oracle

import flatlens as fl
from flatlens.compat import make_torchvision_importable

make_torchvision_importable()
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TEXT = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 6, "max_position_embeddings": 8}
VISION = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TWO = {"num_key_value_heads": 1}


def image(name: str, **config: Any) -> Callable[[], tuple[Any, dict[str, torch.Tensor]]]:
    """A model of images of 8 x 8 pixels."""

    def build() -> tuple[Any, dict[str, torch.Tensor]]:
        settings = getattr(transformers, config.pop("settings", f"{name}Config"))(**config)
        return getattr(transformers, f"{name}Model")(settings), {"pixel_values": (1, 8, 8)}

    return build


def text(name: str, model: str = "", **config: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """A model of three tokens, given as their embeddings."""

    def build() -> tuple[Any, dict[str, Any]]:
        settings = getattr(transformers, f"{name}Config")(**config)
        width = getattr(settings, "d_model", None) or settings.hidden_size
        return getattr(transformers, model or f"{name}Model")(settings), {
            "inputs_embeds": (3, width)
        }

    return build


def whisper_encoder() -> tuple[Any, dict[str, Any]]:
    settings = transformers.WhisperConfig(
        d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=6, num_mel_bins=3,
        max_source_positions=4, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=6,
        vocab_size=11, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperModel(settings).encoder, {"input_features": (3, 8)}


STAGES = {"depths": [1, 1], "hidden_sizes": [4, 8], "num_channels": 1, "image_size": 8}
FAMILIES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "ViT": image("ViT", intermediate_size=6, **VISION, **QUIET),
    "Swin": image(
        "Swin", image_size=8, patch_size=2, num_channels=1, embed_dim=4, depths=[1, 1],
        num_heads=[1, 2], window_size=2, drop_path_rate=0.0, **QUIET,
    ),
    "ConvNeXtV2": image("ConvNextV2", num_stages=2, patch_size=2, **STAGES),
    "DINOv2": image("Dinov2", mlp_ratio=1, **VISION),
    "BERT": text("Bert", **TEXT, **QUIET),
    "GPT2": text("GPT2", vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8),
    "Llama": text("Llama", **TEXT, **TWO),
    "Qwen2": text("Qwen2", **TEXT, **TWO),
    "T5": text(
        "T5", "T5EncoderModel", vocab_size=11, d_model=8, d_kv=4, d_ff=6, num_layers=1, num_heads=2
    ),
    "Mamba": text("Mamba", vocab_size=11, hidden_size=8, state_size=2, num_hidden_layers=1,
                  time_step_rank=2),
    "CLIP": image("CLIPVision", settings="CLIPVisionConfig", intermediate_size=6, **VISION),
    "Whisper": whisper_encoder,
    "SegFormer": image(
        "Segformer", num_channels=1, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[4, 8], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
        mlp_ratios=[1, 1], decoder_hidden_size=4, drop_path_rate=0.0, **QUIET,
    ),
    "Mixtral": text(
        "Mixtral", num_local_experts=2, num_experts_per_tok=2, experts_implementation="eager",
        **TEXT, **TWO,
    ),
}  # fmt: skip


def two_outputs(result: Any) -> torch.Tensor:
    """Two entries of the last hidden state."""
    return result.last_hidden_state.flatten(1)[:, -2:]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_agrees_with_the_oracle(name):
    torch.manual_seed(0)
    model, shapes = FAMILIES[name]()
    model = model.double().eval()
    x = {key: torch.randn(2, *shape, dtype=torch.float64) for key, shape in shapes.items()}
    p, t = fl.probe(model, x, output=two_outputs), oracle(model, x, two_outputs)
    wanted = t.metrics()
    assert fl.sharpness(p) == pytest.approx(wanted["sharpness"], rel=1e-9)
    assert fl.mls(p) == pytest.approx(wanted["mls"], rel=1e-9)
    assert fl.nmls(p) == pytest.approx(wanted["nmls"], rel=1e-9)
    assert all(b.holds for b in fl.bounds(p) if b.verdict == "theorem")
