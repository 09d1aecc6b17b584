"""Accuracy against training compute for several sizes of Vision Transformers, hybrids and ResNets (figure 5, section 4.4).

    vitrail paper run compute --scale laptop

ResNets of several sizes, and for each a hybrid and a Vision Transformer with the same multiply-adds per image, as counted by
`vitrail describe`. All see the same number of images. Training compute is three times the cost of an image (forward, and twice
that backward) for every image seen. The learning rate of each model is tuned with the same number of runs.
"""

from vitrail.studies import base
from vitrail.studies.base import FAMILIES, HYBRID, RESNET, VIT, size_range
from vitrail.studies.intervals import Scores, estimate_reduction, format_points
from vitrail.studies.study import Answer, Cell, Finding, Results, Study, StudyScale, StudySetup

LIMITS = (
    "Small models that are trained from scratch for a short time on small data, where the paper pre-trains on JFT and averages "
    "over five datasets after fine-tuning: with so few images convolutions have the advantage that the paper's figures 3 and 4 "
    "show for small data. Multiply-adds are not time: on a CPU those of a convolution take longer."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every family at every size, each with its own tuning."""
    sizes = [base.match_cost(setup, size["bit"], size["hybrid"]) for size in setup.scale.sizes["models"]]
    n_images = setup.scale.steps * setup.scale.batch
    models = [
        ({"family": family, "size": k, "compute": base.count_training_macs(models[family], n_images)}, models[family])
        for family in FAMILIES
        for k, models in enumerate(sizes, 1)
        if family in models
    ]
    return base.plan_models(setup, results, models)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    known = {(r.at["family"], r.at["size"]): float(r.at["compute"] or 0) for r in results if r.phase == "final"}
    spent = dict(sorted(known.items(), key=lambda item: (FAMILIES.index(str(item[0][0])), item[0][1])))
    tests = Scores(results, "family", "size", order=spent)
    if size_range(tests, VIT, RESNET) is None:
        return base.incomplete_answer([f"{VIT} and {RESNET} of two sizes"], LIMITS)
    lines = {family: {point: spent[point] for point in tests if point[0] == family} for family in FAMILIES}
    return Answer(
        *formulate_finding(tests),
        columns=("family", "size", "training compute, GMAC", "learning rate", "test", "against the ResNet"),
        rows=tuple(
            (family, str(size), f"{spent[family, size] / 1e9:,.0f}", *tests.format_row((family, size), (RESNET, size)))
            for family, size in tests
        ),
        charts=(tests.lines("Test accuracy against training compute", lines, "multiply-adds of the whole training"),),
        limits=LIMITS,
        notes=(*base.describe_parameters(results), *compare_hybrids(tests)),
    )


def formulate_finding(tests: Scores) -> Finding:
    """Compare the Vision Transformer with the ResNet at the largest and at the smallest compute."""
    sizes = size_range(tests, VIT, RESNET)
    assert sizes is not None
    small, large = (tests.subtract((VIT, size), (RESNET, size)) for size in sizes)
    by = format_points(large)
    leads = {
        "no difference": "No difference at this scale: at the same training compute, ViT minus ResNet is "
        f"{by} for the largest models",
        "agrees": f"For the same training compute the largest ViT beats the ResNet by {by}",
        "disagrees": f"For the same training compute the largest ResNet beats the ViT: {by}",
    }
    at_first = f"at the smallest, ViT minus ResNet is {format_points(small)}"
    return f"{leads[large.agreement]}; {at_first}.", large.agreement


def compare_hybrids(tests: Scores) -> tuple[str, ...]:
    """Return a note that compares hybrids with ViTs at the smallest and the largest size."""
    sizes = size_range(tests, HYBRID, VIT)
    if sizes is None:
        return ()
    small, large = (tests.subtract((HYBRID, size), (VIT, size)) for size in sizes)
    note = f"Hybrid minus ViT: {format_points(small)} for the smallest models, {format_points(large)} for the largest"
    if small.is_gain and not large.is_clear and estimate_reduction(small, large).is_gain:
        return (f"{note}: the hybrid leads only where compute is scarce, as in the paper.",)
    return (f"{note}.",)


STUDY = Study(
    name="compute",
    question="Which family is most accurate for the same training compute?",
    reference="figure 5, section 4.4",
    paper_finding=(
        "Vision Transformers use about 2 to 4 times less pre-training compute than ResNets for the same performance (mean of 5 "
        "datasets); hybrids are slightly better than they are at small compute, and the difference vanishes for larger models."
    ),
    scales={
        "test": base.on_one_core(minutes=0.3, seeds=1, steps=3, sizes={
            "depth": 1, "heads": 2, "patch": 2, "models": (
                    {"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1}},
                    {"bit": {"stages": (1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1}},
            )}),
        # CIFAR-10, 5, 13 and 20 M multiply-adds per image. Seconds for 1,000 images on an idle core: ResNets 4.3, 6.7, 6.7;
        # hybrids 2.5, 3.3, 4.5; ViTs 2.0, 3.7, 5.3: 39 in all. 480 steps × 64 = 30,720 images, and validation and test cost
        # as much as 5,000 more: 35.7 × 39 × (2 tuning runs + 3 seeds) = 6,960 s, and 45 × 8 s to start = 7,320 s; two at a
        # time 61 min.
        "laptop": base.on_two_cores(minutes=61, steps=480, lrs=(1e-3, 3e-3), sizes={
            "depth": 4, "heads": 4, "patch": 4, "models": (
                    {"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 2}},
                    {"bit": {"stages": (1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
                    {"bit": {"stages": (1, 1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
            )}),
        # CIFAR-10, 28, 53 and 182 M multiply-adds per image, estimated with 6,000, 4,000 and 1,500 images/s: 10,000 steps ×
        # 256 take 430, 640 and 1,710 s. 3 families × 5 runs × 2,780 s.
        "gpu": base.on_gpu(minutes=695, lrs=(3e-4, 1e-3), sizes={
            "depth": 8, "heads": 4, "patch": 4, "precision": "bf16", "warmup": 1_000, "models": (
                    {"bit": {"stages": (1, 1, 1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
                    {"bit": {"stages": (2, 2, 2, 2), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1, 1), "patch": 1}},
                    {"bit": {"stages": (2, 2, 2, 2), "factor": 0.5, "root": "small"}, "hybrid": {"stages": (2, 2), "patch": 1}},
            )}),
        # R50x1, R101x1 and R50x2 at 224² and what matches them, on ImageNet-21k: 30 epochs of 14 M in batches of 4,096,
        # 102,500 steps; estimated with 8,000, 4,500 and 2,200 images/s on eight GPUs: 15, 26 and 53 h. 3 families.
        "cluster": base.on_cluster(minutes=16_900, sizes={
            "depth": 12, "heads": 12, "patch": 16, **base.TABLE_3, "models": (
                    {"bit": {"stages": (3, 4, 6, 3), "factor": 1.0}, "hybrid": {"stages": (2, 2), "patch": 2}},
                    {"bit": {"stages": (3, 4, 23, 3), "factor": 1.0}, "hybrid": {"stages": (2, 2, 2), "patch": 1}},
                    {"bit": {"stages": (3, 4, 6, 3), "factor": 2.0}, "hybrid": {"stages": (3, 4, 9), "patch": 1}},
            )}),
    },
    plan=plan, interpret=interpret_results, measure=base.measure_cost,
)  # fmt: skip
