"""What a trained model is worth on other data: probes, its head alone, low-rank additions and all of it, within a budget."""

from vitrail.transfer.compare import transfer

__all__ = ["transfer"]
