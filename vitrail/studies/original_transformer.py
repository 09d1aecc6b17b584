"""The Vision Transformer's encoder against the Transformer of 2017, and the effect of its three changes (section 3).

    vitrail paper run original-transformer --scale laptop

Pre-norm, GELU and learned positions against post-norm, ReLU and fixed sinusoids; and the Vision Transformer with one of the three
changes reverted. The learning rate of each encoder is tuned with the same number of runs.
"""

from collections.abc import Mapping
from typing import Any

from vitrail.nn.block import PostNorm, PreNorm
from vitrail.nn.mlp import GELU, ReLU
from vitrail.nn.position import Sinusoid1D
from vitrail.studies import base
from vitrail.studies.base import VIT
from vitrail.studies.intervals import Difference, Scores, format_points
from vitrail.studies.study import Answer, Cell, Finding, Results, Study, StudyScale, StudySetup

ORIGINAL = "Transformer of 2017"
ENCODERS: dict[str, dict[str, Any]] = {
    VIT: {},
    "ViT, norm after": {"block": PostNorm(mlp=GELU())},
    "ViT, ReLU": {"block": PreNorm(mlp=ReLU())},
    "ViT, sinusoid": {"position": Sinusoid1D()},
    ORIGINAL: {"block": PostNorm(mlp=ReLU()), "position": Sinusoid1D()},
}
LIMITS = (
    "A few layers, trained briefly, with a warm-up. Post-norm is known to be unstable in deep models and without warm-up, which "
    "this scale cannot show. The learning rate of every encoder is tuned."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every encoder, each with its own tuning."""
    names = setup.scale.sizes.get("encoders", tuple(ENCODERS))
    models = [({"encoder": name}, base.configure_study_vit(setup, **ENCODERS[name])) for name in names]
    return base.plan_models(setup, results, models)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests = Scores(results, "encoder", order=ENCODERS)
    if missing := tests.find_missing((VIT, ORIGINAL)):
        return base.incomplete_answer(missing, LIMITS)
    changes = tests.compare(VIT)
    whole = changes.pop(ORIGINAL)
    single = {name.removeprefix("ViT, "): change for name, change in changes.items()}
    return Answer(
        *formulate_finding(whole, single),
        columns=("encoder", "learning rate", "test", "against ViT"),
        rows=tuple((name, *tests.format_row(name, VIT)) for name in tests),
        charts=(tests.dots("Test accuracy by encoder"),),
        limits=LIMITS,
        notes=(
            "The paper publishes no comparison of the two: agreement is with the choice that its authors made.",
            *(
                f"One change reverted: {name} {format_points(change)}, {'a' if change.is_clear else 'no'} clear difference."
                for name, change in single.items()
            ),
        ),
    )


def formulate_finding(whole: Difference, single: Mapping[str, Difference]) -> Finding:
    """Compare the Transformer of 2017 with the Vision Transformer, and list the single changes that make a difference."""
    clear = [f"{name} {format_points(change)}" for name, change in single.items() if change.is_clear]
    alone = f"; of single changes, these make a clear difference: {', '.join(clear)}" if clear else ""
    if single and not clear:
        alone = "; no single change makes a clear difference"
    comparisons = {
        "no difference": f"No difference at this scale between the {ORIGINAL} and the ViT",
        "agrees": f"The {ORIGINAL} is worse than the ViT",
        "disagrees": f"The {ORIGINAL} is better than the ViT",
    }
    agreement = whole.negated.agreement
    return f"{comparisons[agreement]}: {format_points(whole)}{alone}.", agreement


STUDY = Study(
    name="original-transformer",
    question="What do the Vision Transformer's departures from the Transformer of 2017 change?",
    reference="section 3",
    paper_finding=(
        "The authors follow the Transformer of 2017 as closely as possible, but with norms before each branch, GELU in place of "
        "ReLU and learned positions in place of sinusoids; they publish no numbers for this choice."
    ),
    scales={
        "test": base.on_one_core(sizes=base.vit_sizes(16, 2, 2, 4, encoders=(VIT, "ViT, norm after", ORIGINAL))),
        # 16 tokens, width 64, depth 8 (norms after each sum matter in depth): 450 images/s on an idle core, 1,300/s without
        # training. 800 steps × 64 = 51,200: 114 s. A tuning run: + 12,000 validation images 9 s + 8 s to start = 131 s. A
        # final run: + 10,000 test images = 139 s. 5 encoders × (4 × 131 + 3 × 139) = 4,705 s; two at a time 39 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=39, lrs=(3e-4, 1e-3, 2e-3, 4e-3),
            sizes=base.vit_sizes(64, 8, 4, 7)),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 5 encoders × 7 runs × 286 s = 167 min.
        "gpu": base.on_gpu(minutes=167, lrs=(1e-4, 3e-4, 1e-3, 3e-3), sizes=base.TI_CIFAR),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, estimated with 6,000 images/s. 5 × (2
        # + 1) runs.
        "cluster": base.on_cluster(minutes=17_500, lrs=(3e-4, 1e-3), sizes=base.B16),
    },
    plan=plan, interpret=interpret_results,
)  # fmt: skip
