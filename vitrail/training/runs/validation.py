"""Share of validation in the time of a run. Costs are counted, not measured, in forward passes of one whole image.

So the number of validations is a function of the recipe and the number of images: a repeated run validates at the same steps.
"""

from dataclasses import dataclass, replace

from vitrail.training.recipe import Recipe, method_of
from vitrail.training.runs.prepare import Prepared

MAX_SHARE = 0.1  # of the training time
TRAINING_PASSES = 3  # forward, backward to the inputs, backward to the weights
MAX_QUERIES, REFERENCES_PER_QUERY = 1_000, 5  # held-out images of a validation of pretraining, training images for k-NN
FEW_QUERIES, MIN_QUERIES = 100, 50  # below the first, there are fewer validations instead; the second is the minimum
MIN_VALIDATIONS = 10  # of pretraining, so that the alarm comes in time; with fewer images rather than fewer validations


@dataclass(frozen=True)
class ValidationCost:
    """Forward passes of a run besides training."""

    validation: float
    ending: float  # evaluation of the written model
    begin: float = 0.0  # before the first step


def has_knn(prepared: Prepared) -> bool:
    """Return whether features are measured by k-NN: where each image has one label."""
    return prepared.labelled and not prepared.train.is_multi_label


def count_training_passes(recipe: Recipe) -> float:
    """Return the forward passes that a training image costs."""
    if recipe.tune in ("head", "text"):
        return 1.0
    if recipe.views is None:
        return TRAINING_PASSES * recipe.objective.kept_patches
    (height, width), (h, w) = recipe.preprocessing.size, recipe.views.size
    large = 2  # crops, which a teacher sees too
    return TRAINING_PASSES * (large + recipe.views.count * h * w / (height * width)) + large


def count_passes(recipe: Recipe, prepared: Prepared) -> ValidationCost:
    """Return the cost of the validations and of the end of a run."""
    held = len(prepared.splits["validation"])
    if method_of(recipe) is None:
        # The written model has the logits of the last validation, of which one batch is computed again; with LoRA it is merged.
        rewritten = recipe.tune.startswith("lora") or recipe.objective.rewrites_head
        again = held if rewritten else min(held, recipe.batch_size)
        return ValidationCost(held, again + len(prepared.splits.get("test", ())))
    signals = count_training_passes(recipe) / TRAINING_PASSES  # the loss of held-out images, without gradients
    whole = replace(recipe, validation_images=None)
    queries, references = count_queries(whole, prepared), count_references(whole, prepared)
    ending = queries * signals + 2 * (queries + references)  # of the trained and of the untrained model
    queries, references = count_queries(recipe, prepared), count_references(recipe, prepared)
    validation = queries * (signals + 1) + references
    return ValidationCost(validation, ending, begin=validation)


def count_queries(recipe: Recipe, prepared: Prepared) -> int:
    """Return the number of held-out images of a validation of pretraining."""
    return min(recipe.validation_images or MAX_QUERIES, len(prepared.splits["validation"]))


def count_references(recipe: Recipe, prepared: Prepared) -> int:
    """Return the number of training images that vote in the k-NN of a validation of pretraining."""
    most = REFERENCES_PER_QUERY * (recipe.validation_images or MAX_QUERIES)
    return min(most, len(prepared.train)) if has_knn(prepared) else 0


def limit_validation(
    recipe: Recipe, prepared: Prepared, fixed: frozenset[str] = frozenset(), passes: float | None = None
) -> Recipe:
    """Return the recipe with so few validations that they take at most a tenth of the training time, but at least one.

    Pretraining validates on fewer images too. `passes` is the cost of a training image where it was measured. A recipe with
    patience, and fields that the user has fixed, stay as they are.
    """
    if recipe.patience is not None or "validate_every" in fixed:
        return recipe
    images = len(prepared.train)
    batch = min(recipe.batch_size, images)
    per_epoch = images // batch
    steps = recipe.total_steps(per_epoch)
    asked = -(-steps // max(1, round(recipe.validate_every * per_epoch)))
    budget = MAX_SHARE * steps * batch * (passes or count_training_passes(recipe))

    def count_affordable(recipe: Recipe) -> int:
        cost = count_passes(recipe, prepared)
        return int((budget - cost.begin) / cost.validation)

    count = count_affordable(recipe)
    if method_of(recipe) is not None and "validation_images" not in fixed:
        enough = [(n, min(asked, MIN_VALIDATIONS)) for n in range(MAX_QUERIES, FEW_QUERIES, -10)]
        few = [(n, 1) for n in range(FEW_QUERIES, MIN_QUERIES - 1, -10)]
        affordable = (n for n, least in enough + few if count_affordable(replace(recipe, validation_images=n)) >= least)
        fewer = replace(recipe, validation_images=next(affordable, MIN_QUERIES))
        count = count_affordable(fewer)
        recipe = recipe if count_passes(fewer, prepared) == count_passes(recipe, prepared) else fewer
    if count >= asked:
        return recipe
    return replace(recipe, validate_every=-(-steps // max(1, count)) / per_epoch)


def describe_validation(recipe: Recipe, prepared: Prepared) -> str:
    """Return the choices of `limit_validation` in words. A single validation may take longer than a tenth of the time."""
    per_epoch = len(prepared.train) // min(recipe.batch_size, len(prepared.train))
    every = max(1, round(recipe.validate_every * per_epoch))
    number = (
        f" on {count_queries(recipe, prepared):,} held-out {prepared.train.media}s" if recipe.validation_images else ""
    )
    if every >= recipe.total_steps(per_epoch):
        return f"validation once, after the last step{number}: the run is short"
    return f"validation every {every:,} steps{number}: at most a tenth of the time"
