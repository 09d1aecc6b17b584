"""Small models with two towers, as OpenCLIP and transformers make them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.peers import saved_state, spread

pytest.importorskip("open_clip", reason="open_clip_torch is not installed: pip install 'vitrail[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import open_clip.loss
import transformers
from open_clip.model import CLIP, CustomTextCLIP
from timm.models.vision_transformer import VisionTransformer

VOCABULARY, CONTEXT, TEXTS = 99, 12, 5
VISION = {"image_size": 32, "layers": 2, "width": 128, "patch_size": 16}
TEXT = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 64, "heads": 1, "layers": 3}
HF_VISION = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
HF_VISION |= {"image_size": 32, "patch_size": 16}
HF_TEXT = {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5}
HF_TEXT |= {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}


class Trunk(nn.Module):
    """The visual tower of OpenCLIP's SigLIP: timm's model as `trunk`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.trunk = VisionTransformer(
            img_size=32,
            patch_size=16,
            embed_dim=64,
            depth=2,
            num_heads=1,
            num_classes=0,
            **{"class_token": False, "global_pool": "map", **options},
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.trunk(images)


def make_open_clip(quick: bool = False, **text: Any) -> nn.Module:
    return CLIP(32, VISION, {**TEXT, **text}, quick_gelu=quick)


def make_custom() -> nn.Module:
    return CustomTextCLIP(32, VISION, TEXT)


def make_open_clip_siglip() -> nn.Module:
    options = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True, "norm_kwargs": {"eps": 1e-6}}
    model = CustomTextCLIP(64, VISION, {**TEXT, **options}, init_logit_bias=-10.0)
    model.visual = Trunk()
    return model


def make_transformers_clip(**text: Any) -> nn.Module:
    config = transformers.CLIPConfig(text_config={**HF_TEXT, **text}, vision_config=HF_VISION, projection_dim=24)
    return transformers.CLIPModel(config)


def make_transformers_siglip() -> nn.Module:
    text = {**HF_TEXT, "projection_size": 48}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=HF_VISION))


@dataclass(frozen=True)
class Peer:
    """How to make a peer, the format of its file, the target that writes it, and what its tensors do not tell."""

    make: Any
    form: str
    target: str
    assume: dict[str, Any]


PEERS = {
    "open_clip": Peer(make_open_clip, "clip towers", "clip", {}),
    "openai": Peer(lambda: make_open_clip(True), "clip towers", "clip", {"gelu": "quick"}),
    "custom": Peer(make_custom, "open_clip towers", "clip", {}),
    "open_clip siglip": Peer(make_open_clip_siglip, "open_clip siglip", "clip", {}),
    "clip": Peer(
        lambda: make_transformers_clip(eos_token_id=2), "transformers clip towers", "hf", {"heads": 4, "text_heads": 5}
    ),
    "clip eos": Peer(
        lambda: make_transformers_clip(eos_token_id=7),
        "transformers clip towers",
        "hf",
        {"heads": 4, "text_heads": 5, "text_token": 7},
    ),
    "siglip": Peer(make_transformers_siglip, "transformers siglip towers", "hf", {"heads": 4, "text_heads": 5}),
}


def make_peer(name: str) -> nn.Module:
    """Return a peer with random weights, also where they would be zero or one."""
    torch.manual_seed(3)
    return spread(PEERS[name].make(), 0.03).eval()


def make_batch() -> tuple[Tensor, Tensor]:
    """Return images, and tokens with one end of the text each, which the id 7 marks too."""
    torch.manual_seed(4)
    tokens = torch.randint(10, VOCABULARY - 1, (TEXTS, CONTEXT))
    for row, end in enumerate((3, 11, 5, 8, 4)):
        tokens[row, end:] = 0
        tokens[row, end] = VOCABULARY - 1
    tokens[0, 2] = 7
    tokens[3, 4] = 7
    return torch.randn(TEXTS, 3, 32, 32), tokens


def compute(peer: nn.Module, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the peer's features of images and texts as unit vectors, and the logits of every pair."""
    if isinstance(peer, transformers.PreTrainedModel):
        out = peer(pixel_values=images, input_ids=tokens)
        return out.image_embeds, out.text_embeds, out.logits_per_image
    with_images, with_texts = peer.encode_image(images, True), peer.encode_text(tokens, True)
    return with_images, with_texts, peer.get_logits(images, tokens)[0]


def compute_loss(peer: nn.Module, images: Tensor, tokens: Tensor) -> Tensor:
    """Return the peer's loss of pairs."""
    if isinstance(peer, transformers.PreTrainedModel):
        return peer(pixel_values=images, input_ids=tokens, return_loss=True).loss
    features = peer.encode_image(images, True), peer.encode_text(tokens, True), peer.logit_scale.exp()
    if peer.logit_bias is not None:
        return open_clip.loss.SigLipLoss()(*features, peer.logit_bias)
    return open_clip.ClipLoss()(*features)


def read_state(peer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the peer's file."""
    if isinstance(peer, transformers.PreTrainedModel):
        return saved_state(peer)
    return {name: tensor.detach().clone() for name, tensor in peer.state_dict().items()}
