"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): neighbours in a batch, blended or with a piece exchanged.

B pictures, K classes. The partner of picture 2i is 2i+1 and the other way round: partners never sit in different processes.
"""

import torch
from torch import Tensor

from vitrail.objectives.draw import Draw

WHICH, PROPORTION, PLACE = 1, 2, 3  # streams of chance


def mix(images: Tensor, targets: Tensor, mixup: float, cutmix: float, draw: Draw) -> tuple[Tensor, Tensor]:
    """Images [B, C, H, W] and soft targets [B, K], mixed with their partners.

    With both, each pair is blended or cut with equal chance. A last picture without a partner stays as it is.
    """
    if not mixup and not cutmix:
        return images, targets
    b, _, height, width = images.shape
    pair = torch.arange(b, device=images.device) // 2 * 2  # both of a pair use the first one's numbers
    partner = (torch.arange(b, device=images.device) ^ 1).clamp(max=b - 1)
    cut = draw.uniform(1, WHICH)[pair, 0] < (0.5 if mixup and cutmix else float(cutmix > 0))
    share = torch.ones(b, device=images.device)  # of the picture itself
    for alpha, chosen in ((mixup, ~cut), (cutmix, cut)):
        if alpha:
            share = torch.where(chosen, draw.beta(alpha, PROPORTION)[pair], share)

    # A box of (1 - share) of the picture around a random point, cut off at the border, as CutMix draws it.
    centre = draw.uniform(2, PLACE)[pair]
    side = (1 - share).sqrt() / 2
    y = (torch.arange(height, device=images.device) + 0.5) / height
    x = (torch.arange(width, device=images.device) + 0.5) / width
    in_rows = (y - centre[:, :1]).abs() < side[:, None]  # [B, H]
    in_columns = (x - centre[:, 1:]).abs() < side[:, None]  # [B, W]
    box = in_rows[:, :, None] & in_columns[:, None, :] & cut[:, None, None]  # [B, H, W]
    share = torch.where(cut, 1 - box.float().mean((1, 2)), share)

    if not cutmix:
        weight = share[:, None, None, None]
    else:
        weight = torch.where(cut[:, None, None], 1 - box.float(), share[:, None, None])[:, None]
    images = images * weight + images[partner] * (1 - weight)
    return images, targets * share[:, None] + targets[partner] * (1 - share[:, None])
