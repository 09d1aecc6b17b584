"""Checkpoints of vitrail and of other projects: one key table per format, used for reading and writing.

`TARGET_NAMES` stands here because the help texts of the command line read it without importing PyTorch.
"""

# of conversions
IMAGE_TARGET_NAMES = ("vitrail", "timm", "hf", "big_vision", "torchvision", "vit-pytorch", "clip", "dinov2", "dinov3")
TARGET_NAMES = (*IMAGE_TARGET_NAMES, "videomae", "timesformer")  # the last two are for models of clips
