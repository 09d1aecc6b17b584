"""The matrix of what converts to what, as the parity tests prove it: `python -m tests.parity.matrix` prints it for the docs."""

from vitrail.checkpoints.convert import NAMES

HEAD = f"| made by | {' | '.join(NAMES)} |"


def matrix() -> str:
    """A table in Markdown, a row for each checkpoint that the tests make."""
    from tests.parity.made import CASES

    rows = [HEAD, "|---" * (len(NAMES) + 1) + "|"]
    for name, case in CASES.items():
        can = {"vitrail", *case.targets.split()}
        rows.append(f"| {name} | " + " | ".join("●" if to in can else "" for to in NAMES) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    import torch

    library = torch.library.Library("torchvision", "DEF")  # as in conftest.py
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    print(matrix())
