"""Masked patch prediction with its three targets, and with less corrupted (section 4.6, appendix B.1.2).

    vitrail paper run masked-patches --scale laptop

Models are pre-trained on all training images without labels. The target is the mean colour of each corrupted patch, its 4×4
colours, or its pixels by squared error, with 50 % of the patches corrupted; or mean colours with 15 %. Each model is then
fine-tuned with a few labels per class, and compared with training from scratch on those labels and on all labels.
"""

from collections.abc import Mapping
from dataclasses import replace

from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.studies import base, study
from vitrail.studies.intervals import Difference, Scores, format_points
from vitrail.studies.study import Answer, Cell, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.training.recipe import Recipe
from vitrail.training.schedule import Cosine

MEAN_COLOUR, DOWNSAMPLED, PIXELS, LESS_MASKED = "colour, 50 %", "4×4 colours, 50 %", "pixels, 50 %", "colour, 15 %"
SCRATCH, LABELLED = "from scratch", "from scratch, all labels"
OBJECTIVES = {
    MEAN_COLOUR: MaskedPatches("colour", 0.5),
    DOWNSAMPLED: MaskedPatches("down", 0.5),
    PIXELS: MaskedPatches("pixels", 0.5),
    LESS_MASKED: MaskedPatches("colour", 0.15),
}
METHODS = (SCRATCH, *OBJECTIVES, LABELLED)
PAPER_ON_TARGETS = {  # compared with mean colours at 50 %
    DOWNSAMPLED: "works quite well too, though mean colours had the best few-shot scores",
    PIXELS: "works quite well too, slightly worse",
    LESS_MASKED: "is slightly worse by few-shot scores",
}
LIMITS = (
    "The paper pre-trains B/16 on hundreds of millions of images and fine-tunes on all of ImageNet; here both use the same "
    "few images, and fine-tuning sees few labels, where pre-training can help at all. “All labels” is not the paper's "
    "supervised pre-training on other data, but what labels for every image would have given. All targets are learned at one "
    "learning rate, which suits some better than others. Pre-trained models have seen images for longer than those from "
    "scratch: what they gain may come of that."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return a pre-training cell for each objective and seed, and fine-tuning cells once an objective's models are finished."""
    # Explicit fractions: training with and without labels uses the same split.
    setup = replace(setup, data=replace(setup.data, fractions=setup.data.fractions or study.DEFAULT_FRACTIONS))
    scale, seeds = setup.scale, range(setup.scale.seeds)
    cells = [
        Cell({"learnt": method, "seed": seed}, pretraining_recipe(setup, objective, seed), "base")
        for method, objective in OBJECTIVES.items()
        for seed in seeds
    ]
    bases = {(r.at["learnt"], r.at["seed"]): r for r in results if r.phase == "base"}
    ready = [method for method in METHODS if method not in OBJECTIVES or all((method, seed) in bases for seed in seeds)]

    def tuning(point: GridPoint, lr: float, seed: int) -> Recipe:
        method, model = point["begins"], base.configure_study_vit(setup)
        if method == LABELLED:
            steps, batch = scale.sizes["base_steps"], scale.sizes.get("base_batch", scale.batch)
            schedule = Cosine(warmup=max(1, steps // 10))
            recipe = base.build_recipe(setup, model, lr, seed, schedule=schedule)
            return replace(recipe, steps=steps, batch_size=batch)
        few = replace(setup.data, per_class=scale.sizes["labels"], drawn=seed)
        schedule = Cosine(warmup=max(1, scale.steps // 10))
        init = None if method == SCRATCH else str(setup.directory / bases[method, seed].run / "model.safetensors")
        return base.build_recipe(setup, model, lr, seed, data=few, schedule=schedule, init=init)

    return cells + base.plan_tuned(setup, results, [{"begins": method} for method in ready], tuning)


def pretraining_recipe(setup: StudySetup, objective: MaskedPatches, seed: int) -> Recipe:
    """Return the pre-training recipe of an objective, as in `vitrail pretrain --method mpp`."""
    sizes, model = setup.scale.sizes, replace(base.configure_study_vit(setup), classes=None)
    steps = sizes["base_steps"]
    flip = () if setup.facts.channels == 1 else (Flip(),)
    crop = RandomResizedCrop(model.image_size, scale=(0.5 if base.has_small_images(setup) else 0.2, 1.0))
    return base.build_recipe(
        setup,
        model,
        sizes["base_rate"],
        seed,
        name="mpp",
        data=replace(setup.data, task="none"),
        augment=(crop, *flip),
        objective=objective,
        schedule=Cosine(warmup=sizes.get("base_warmup", max(1, steps // 10))),
        steps=steps,
        batch_size=sizes.get("base_batch", setup.scale.batch),
        collapse="warn",  # a collapsed model is a result too
    )


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests, labels = Scores(results, "begins", order=METHODS), scale.sizes["labels"]
    if missing := tests.find_missing((SCRATCH, MEAN_COLOUR, LABELLED)):
        return base.incomplete_answer(missing, LIMITS)
    against = tests.compare(MEAN_COLOUR)
    return Answer(
        *formulate_finding(against[SCRATCH].negated, against[LABELLED], f"{labels} labels per class"),
        columns=("begins", "learning rate", "test", "against colour, 50 %"),
        rows=tuple((method, *tests.format_row(method, MEAN_COLOUR)) for method in tests),
        charts=(tests.dots(f"Fine-tuned with {labels} labels per class", y_name="top-1 on test images"),),
        limits=LIMITS,
        notes=compare_targets(against),
    )


def formulate_finding(gain: Difference, behind: Difference, few: str) -> Finding:
    """Compare mean-colour pre-training with training from scratch on few labels, and training on all labels with it."""
    by, left = format_points(gain), format_points(behind)
    pretraining = "Pre-training on the mean colours of masked patches"
    if not gain.is_clear:
        same = f"makes no clear difference to training from scratch with {few}"
        return f"{pretraining} {same}: {by}, no difference at this scale.", "no difference"
    if gain.is_loss:
        return f"{pretraining} costs with {few}: {by} against scratch.", "disagrees"
    brings = f"{pretraining} brings {by} over scratch with {few}"
    if behind.is_gain:
        return f"{brings}, and stays behind training with all labels, which has {left} more.", "agrees"
    if behind.is_loss:
        return f"{brings}, and is even ahead of training with all labels, which has {left}.", "disagrees"
    return f"{brings}; how far it stays behind training with all labels is not clear ({left}).", "agrees"


def compare_targets(against: Mapping[str, Difference]) -> tuple[str, ...]:
    """Return notes that compare the other targets and the lower masking ratio with mean colours at 50 %."""
    ours = {"agrees": "better", "disagrees": "worse", "no difference": "no clear difference"}
    return tuple(
        f"{method}: {ours[against[method].agreement]} against colour, 50 % ({format_points(against[method])}); in the paper it "
        f"{paper}."
        for method, paper in PAPER_ON_TARGETS.items()
        if method in against
    )


STUDY = Study(
    name="masked-patches",
    question="Can a Vision Transformer learn without labels from masked patches, and which target works best?",
    reference="section 4.6, appendix B.1.2",
    paper_finding=(
        "B/16 reaches 79.9 % on ImageNet after fine-tuning: 2 % better than from scratch, 4 % behind supervised pre-training. "
        "All three targets worked quite well, squared error of pixels slightly worse; mean colour had the best few-shot scores, "
        "and 15 % instead of 50 % corrupted slightly worse ones (without numbers)."
    ),
    scales={
        "test": base.on_one_core(minutes=0.3, seeds=1, steps=3, sizes=base.vit_sizes(
            16, 1, 2, 4, image=16, base_rate=1e-3, base_steps=3, labels=10)),
        # Width 96, depth 4, 16 patches: 500 images/s on a core, 300 with 4×4 colours (8,192 answers a patch). Pre-training 1,200
        # steps × 128 = 153,600 images: 3 × 307 s + 512 s, × 3 seeds = 4,300 s. Fine-tuning 300 steps × 64 with 51 s each, three
        # tuning runs and three seeds of five methods: 30 × 51 s = 1,530 s. All labels: 6 × 300 s = 1,800 s. On two cores: 64 min.
        "laptop": base.on_two_cores(minutes=64, steps=300, lrs=(3e-4, 1e-3, 3e-3), sizes=base.vit_sizes(
            96, 4, 3, 8, weight_decay=0.05, base_rate=1e-3, base_steps=1_200, base_batch=128, labels=100)),
        # S/16 at 224², 2,000 images/s: 50,000 steps × 512 = 3.6 h, 12 such; all labels 6 × 3.6 h; fine-tuning 30 × 0.2 h.
        "gpu": base.on_gpu(data="imagenet", minutes=4_250, steps=3_000, batch=512, lrs=(1e-4, 3e-4, 1e-3),
            sizes=base.vit_sizes(384, 12, 6, 16, image=224, weight_decay=0.05, base_rate=5e-4, base_steps=50_000,
            labels=50, precision="bf16")),
        # B/16 for 100 epochs of ImageNet-21k's 14 M images, 342,000 steps × 4,096 at 7,000 images/s on eight GPUs: 56 h,
        # 12 such, and 6 with all labels; fine-tuning 30 × 1 h.
        "cluster": base.on_cluster(minutes=62_000, seeds=3, steps=20_000, batch=512, lrs=(1e-4, 3e-4, 1e-3),
            sizes=base.vit_sizes(768, 12, 12, 16, image=224, weight_decay=0.03, base_rate=1e-3, base_steps=342_000,
            base_warmup=10_000, base_batch=4096, labels=100, precision="bf16")),
    },
    plan=plan, interpret=interpret_results,
)  # fmt: skip
