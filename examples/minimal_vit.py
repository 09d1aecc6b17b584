"""The whole Vision Transformer in plain PyTorch, to read beside the paper.

    python examples/minimal_vit.py

builds the paper's ViT-B/16, copies the weights of `vitrail.build("B/16")` into it and compares the logits of both on
one random image. Expect 86,567,656 parameters and a largest difference near 1e-6, the rounding of 32-bit floats.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021.
Equations 1 to 4 are in section 3.1, equations 5 to 8 in appendix A, the sizes in table 1.

Shapes: B images of C channels and H×W pixels, patches of P×P pixels, N = HW/P² patches in h rows and w columns,
T = N + 1 tokens, D values per token (width), k heads of D_h = D/k values, K classes.
"""

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Cut the image into patches, flatten each one and project it: x_p E of equation 1."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Linear(channels * patch_size**2, width)  # E

    def forward(self, image: Tensor) -> Tensor:  # [B, C, H, W]
        p = self.patch_size
        x = image.unfold(2, p, p).unfold(3, p, p)  # [B, C, h, w, P, P]
        x_p = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # [B, N, C·P²]
        return self.projection(x_p)  # [B, N, D]


class MSA(nn.Module):
    """Multi-head self-attention, equations 5 to 8: every token attends to every token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # U_qkv of all heads
        self.out = nn.Linear(width, width)  # U_msa

    def forward(self, z: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = (self.split_heads(x) for x in self.qkv(z).chunk(3, dim=-1))  # eq. 5: each [B, k, T, D_h]
        attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)  # eq. 6: [B, k, T, T], rows sum to 1
        heads = attention @ v  # eq. 7: [B, k, T, D_h]
        return self.out(heads.transpose(1, 2).flatten(2))  # eq. 8: [B, T, D]

    def split_heads(self, x: Tensor) -> Tensor:  # [B, T, D]
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, k, T, D_h]


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token by itself."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(self, z: Tensor) -> Tensor:  # [B, T, D]
        return self.fc2(nn.functional.gelu(self.fc1(z)))  # [B, T, D]


class Block(nn.Module):
    """One layer of the encoder, equations 2 and 3."""

    def __init__(self, width: int, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.msa = MSA(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, mlp_width)

    def forward(self, z: Tensor) -> Tensor:  # [B, T, D]
        z = z + self.msa(self.norm1(z))  # eq. 2: mix the tokens
        return z + self.mlp(self.norm2(z))  # eq. 3: transform each token


class ViT(nn.Module):
    """The Vision Transformer: image to tokens to logits. The defaults are B/16 of table 1."""

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        channels: int = 3,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_width: int = 3072,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        patches = (image_size // patch_size) ** 2  # N
        self.embed = PatchEmbedding(channels, patch_size, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))  # x_class
        self.position = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))  # E_pos
        self.blocks = nn.ModuleList(Block(width, heads, mlp_width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:  # [B, C, H, W]
        x_p = self.embed(image)  # [B, N, D]
        x_class = self.class_token.expand(len(image), -1, -1)  # [B, 1, D]
        z = torch.cat((x_class, x_p), dim=1) + self.position  # eq. 1: z_0, [B, T, D]
        for block in self.blocks:
            z = block(z)  # eq. 2 and 3: z_1 to z_L, [B, T, D]
        y = self.norm(z[:, 0])  # eq. 4: the class token represents the image, [B, D]
        return self.head(y)  # logits, [B, K]


# The few parameters that have other names in vitrail, where each belongs to a module that can be exchanged.
VITRAIL_NAMES = {
    "prefix.outputs": "class_token",
    "position.weight": "position",
    "pool.norm.weight": "norm.weight",
    "pool.norm.bias": "norm.bias",
}


def rename_vitrail_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a vitrail ViT under the names of this file."""
    return {VITRAIL_NAMES.get(name, name): tensor for name, tensor in state.items()}


def main() -> None:
    import vitrail

    torch.manual_seed(0)
    reference = vitrail.build("B/16", init="deit").eval()  # "vit", the default, starts with logits of zero
    model = ViT().eval()
    model.load_state_dict(rename_vitrail_state(reference.state_dict()))

    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        logits, expected = model(image), reference(image)
    print(f"parameters          {sum(p.numel() for p in model.parameters()):,}")
    print(f"logits              {list(logits.shape)}, largest {expected.abs().max():.3f}")
    print(f"largest difference  {(logits - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
