"""How unlike the heads of a layer are, and how unlike its queries: 0 is where attention has collapsed.

Only patches have a place in these: prefix tokens are left out on both sides, as Park et al. 2023 do ("What Do Self-Supervised
Vision Transformers Learn?").

H heads, N patches, T tokens, r rows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.analysis.heads import entropies


def of_patches(rows: slice, attention: Tensor, prefix: int) -> Tensor:
    """What patches attend to among patches: [H, r, T] to [H, up to r, N]."""
    return attention[:, max(0, prefix - rows.start) :, prefix:]


class Diversity:
    """1 minus the cosine between what two heads attend to, the mean over queries and over the other heads.

    0 for a head that every other one copies, 1 for one that never looks where another does; no number for a head that is alone.
    """

    def __init__(self, heads: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.queries = prefix, 0
        self.total = torch.zeros(heads, heads, device=device)

    def see(self, rows: slice, attention: Tensor) -> None:
        """Some rows, [H, r, T]."""
        one = F.normalize(of_patches(rows, attention, self.prefix), dim=-1)
        self.queries += one.shape[1]
        self.total += one.flatten(1) @ one.flatten(1).T  # cosines, summed over queries

    def result(self) -> Tensor:  # [H]
        others = self.total.sum(1) - self.total.diagonal()
        return (1 - others / (self.queries * (len(others) - 1))).clamp(0, 1)


class Mutual:
    """Normalised mutual information of query and key, I(q; k) / √(H(q) H(k)), with all queries equally likely.

    0 where all queries attend to the same (whatever that is), 1 where each attends to one patch of its own.
    """

    def __init__(self, heads: int, patches: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.patches = prefix, patches
        self.keys = torch.zeros(heads, patches, device=device)  # p(k), times N
        self.given = torch.zeros(heads, device=device)  # H(k | q), times N

    def see(self, rows: slice, attention: Tensor) -> None:
        """Some rows, [H, r, T]."""
        attention = of_patches(rows, attention, self.prefix)
        share = attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        self.keys += share.sum(1)
        self.given += entropies(share).sum(1)

    def result(self) -> Tensor:  # [H]
        of_keys = entropies(self.keys / self.patches)
        scale = (math.log(self.patches) * of_keys).sqrt()
        shared = (of_keys - self.given / self.patches).clamp_min(0)
        # Where all queries look at one and the same patch there is nothing to share, and no scale to divide by.
        return torch.where(scale > 1e-6, shared / scale.clamp_min(1e-6), 0.0).clamp_max(1)
