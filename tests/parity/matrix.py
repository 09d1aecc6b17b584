"""The conversion table that the parity tests verify: `python -m tests.parity.matrix` prints it for the docs."""

from vitrail.checkpoints import IMAGE_TARGET_NAMES

HEAD = f"| made by | {' | '.join(IMAGE_TARGET_NAMES)} |"


def matrix() -> str:
    """Return the table in Markdown, one row per checkpoint of the tests."""
    from tests.parity.made import CASES

    rows = [HEAD, "|---" * (len(IMAGE_TARGET_NAMES) + 1) + "|"]
    for name, case in CASES.items():
        can = {"vitrail", *case.targets.split()}
        rows.append(f"| {name} | " + " | ".join("●" if to in can else "" for to in IMAGE_TARGET_NAMES) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    import torch

    library = torch.library.Library("torchvision", "DEF")  # as in conftest.py
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    print(matrix())
