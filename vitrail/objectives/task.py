"""What every objective's task has in common: a model inside, a loss out, and what else the loop and a validation may ask."""

from torch import Tensor, nn

from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.draw import Draw


class Task(nn.Module):
    """A model and what it is trained for. `forward` takes pictures, targets and chance, and gives the `loss`."""

    model: ViT | BiT

    def after_step(self, step: int) -> None:
        """What follows an optimiser step: a momentum teacher follows its student."""

    def standard(self, y: Tensor) -> Tensor:
        """Features [n, F] of the model that is kept, as the file that is written will give them."""
        return y

    def written(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model that is kept, as they are to be written."""
        return weights

    def signals(self, images: Tensor | tuple[Tensor, ...], draw: Draw) -> dict[str, Tensor]:
        """Numbers worth watching, of pictures that are not trained on: the `loss` at least."""
        raise AssertionError("an objective without labels says what to watch")
