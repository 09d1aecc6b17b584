"""Label errors, training without them, and choosing what to label: results over seeds, with intervals.

    python benchmarks/label_errors.py --clothing DIR --pets DIR --model deit_tiny.safetensors

A DIR is a folder with train/ and validation/: of classes (clothing), or of images/ whose breed is the file name up to its last
underscore (pets). Features are computed once and cached; labels are flipped in memory. Peers are used if they are installed:
cleanlab judges the same out-of-fold probabilities.

1. `suspects`: 5 % of the training labels are flipped, at random or to the class that is most often confused with theirs.
   Precision and recall of the list of suspects, and the average precision of the ranking, against cleanlab's.
2. `training`: the linear classifier of the features, trained with the flipped labels, without the suspects, with the suggested
   labels in their place, and with the true labels; accuracy on validation.
3. `next`: 20 rounds of choosing images, from one label per class; labels needed for the same accuracy as random choice.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources import load_dataset
from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS
from vitrail.labelling.folds import assign_folds, choose_penalty, predict_out_of_fold
from vitrail.labelling.images import Compute, compute_features, group_duplicates, open_features
from vitrail.labelling.selection import choose_images
from vitrail.labelling.suspects import FOLDS, score_labels
from vitrail.metrics.calibration import probabilities
from vitrail.metrics.linear import fit_linear_probe
from vitrail.utils.devices import processor_name

SHARED = Path(__file__).resolve().parents[2] / "shared"
NOISE = 0.05
ROUNDS = 20
METHODS = ("uncertain-diverse", "margin", "k-center", "random")
Arrays = tuple[np.ndarray, np.ndarray]  # features and labels


def read_split(source: str, label_from: str | None, split: str | None, model: Any) -> tuple[np.ndarray, Any, Any]:
    """Return features, images and dataset of a split."""
    dataset = load_dataset(source, label_from=label_from, fractions=TRAIN_ONLY_FRACTIONS)
    images = dataset[split or "train"]
    read = compute_features(model, images, Compute(workers=1))
    assert len(read.indices) == len(images), "every image of the benchmark must be readable"
    return read.values, images, dataset


def read_data(name: str, folder: str, model: Any) -> tuple[Arrays, Arrays, int, np.ndarray]:
    """Return training and validation arrays, the number of classes, and the near-duplicates of the training images."""
    if name == "clothing":
        x, images, dataset = read_split(folder, None, "train", model)
        held_x, held, _ = read_split(folder, None, "validation", model)
        groups = group_duplicates(dataset)[: len(images)]  # train is the first split
    else:
        x, images, dataset = read_split(f"{folder}/train/images", "^(.+)_", None, model)
        held_x, held, _ = read_split(f"{folder}/validation/images", "^(.+)_", None, model)
        groups = group_duplicates(dataset)
    names = {label: number for number, label in enumerate(images.classes)}
    known = np.array([label in names for label in held.classes])[held.targets]
    held_y = np.array([names.get(label, -1) for label in held.classes])[held.targets]
    return (x, images.targets), (held_x[known], held_y[known]), len(names), groups


def find_confusions(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """Return for each class the other one that a linear classifier predicts most often for it, [K]."""
    predicted = probabilities(predict_out_of_fold(x, y, classes, assign_folds(y, FOLDS)), multilabel=False)
    mean = np.array([predicted[y == k].mean(0) for k in range(classes)])
    np.fill_diagonal(mean, -1)
    return mean.argmax(1)


def flip_labels(y: np.ndarray, classes: int, kind: str, confusions: np.ndarray, seed: int) -> np.ndarray:
    """Return labels of which NOISE are wrong, to a random other class or to the one that is confused most."""
    generator, flipped = np.random.default_rng(seed), y.copy()
    for index in generator.permutation(len(y))[: round(NOISE * len(y))]:
        others = np.delete(np.arange(classes), y[index])
        flipped[index] = confusions[y[index]] if kind == "confusion" else generator.choice(others)
    return flipped


def score_list(found: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Return precision, recall and F1 of a list of suspects."""
    hits = int((found & wrong).sum())
    precision, recall = hits / max(1, int(found.sum())), hits / int(wrong.sum())
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    return {"listed": int(found.sum()), "precision": precision, "recall": recall, "f1": f1}


def judge_with_cleanlab(labels: np.ndarray, predicted: np.ndarray, wrong: np.ndarray) -> dict[str, Any] | None:
    """Return the lists and rankings of cleanlab for these probabilities; None if it is not installed."""
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_normalized_margin_for_each_label, get_self_confidence_for_each_label
    except ImportError:
        return None
    from sklearn.metrics import average_precision_score

    result: dict[str, Any] = {}
    for method in ("prune_by_noise_rate", "confident_learning", "both"):
        found = find_label_issues(labels, predicted, filter_by=method, n_jobs=1)
        result[method] = score_list(np.asarray(found), wrong)
    rankings = {
        "self_confidence": get_self_confidence_for_each_label(labels, predicted),
        "margin": get_normalized_margin_for_each_label(labels, predicted),
    }
    return result | {f"ap_{name}": float(average_precision_score(wrong, -q)) for name, q in rankings.items()}


def accuracy(x: np.ndarray, y: np.ndarray, held: Arrays, classes: int, c: float) -> float:
    """Return the validation accuracy of a linear classifier."""
    fitted = fit_linear_probe(x, y, held[0], classes, (c,))
    return float((fitted.logits.argmax(1) == held[1]).mean())


def measure_suspects(
    train: Arrays, held: Arrays, classes: int, groups: np.ndarray, kind: str, seed: int, confusions: np.ndarray
) -> dict[str, Any]:
    """Return the results of one seed: the list, its peers, and training without it."""
    from sklearn.metrics import average_precision_score

    x, y = train
    labels = flip_labels(y, classes, kind, confusions, seed)
    wrong = labels != y
    scores = score_labels(x, labels, classes, groups=groups, seed=seed)
    ours = score_list(scores.suspected, wrong) | {"ap": float(average_precision_score(wrong, scores.score))}
    ours["noise_rate"] = scores.joint.noise_rate
    c = choose_penalty(x, labels, classes)  # one for all, chosen with the wrong labels
    kept, corrected = ~scores.suspected, np.where(scores.suspected, scores.mean.argmax(1), labels)
    training = {
        "flipped": accuracy(x, labels, held, classes, c),
        "without_suspects": accuracy(x[kept], labels[kept], held, classes, c),
        "suggested": accuracy(x, corrected, held, classes, c),
        "without_flipped": accuracy(x[~wrong], labels[~wrong], held, classes, c),
        "true": accuracy(x, y, held, classes, c),
    }
    return {
        "seed": seed,
        "flipped": int(wrong.sum()),
        "ours": ours,
        "cleanlab_same_classifier": judge_with_cleanlab(labels, scores.classifier, wrong),
        "cleanlab_same_mean": judge_with_cleanlab(labels, scores.mean, wrong),
        "training": training,
    }


def run_rounds(train: Arrays, held: Arrays, classes: int, method: str, budget: int, seed: int, c: float) -> list[float]:
    """Return the validation accuracy after each round, from one label per class."""
    x, y = train
    generator = np.random.default_rng(seed)
    known = np.zeros(len(y), dtype=bool)
    known[[generator.choice(np.flatnonzero(y == k)) for k in range(classes)]] = True
    curve = []
    for number in range(ROUNDS + 1):
        fitted = fit_linear_probe(x[known], y[known], held[0], classes, (c,))
        curve.append(float((fitted.logits.argmax(1) == held[1]).mean()))
        pool = np.flatnonzero(~known)
        if number == ROUNDS or not len(pool):
            break
        logits = x[pool].astype(np.float64) @ fitted.weight.T + fitted.bias
        predicted = probabilities(logits, multilabel=False)
        known[pool[choose_images(method, x[pool], predicted, x[known], budget, 1000 * seed + number)]] = True
    return curve


def count_labels(curve: Sequence[float], target: float, first: int, budget: int) -> float | None:
    """Return the labels at which a curve first reaches an accuracy, interpolated; None if it does not."""
    for number, value in enumerate(curve):
        if value >= target:
            if not number:
                return float(first)
            share = (target - curve[number - 1]) / (value - curve[number - 1])
            return first + budget * (number - 1 + share)
    return None


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and Student's 95 % interval of it."""
    from scipy.stats import t

    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def measure_next(train: Arrays, held: Arrays, classes: int, budget: int, seeds: int) -> dict[str, Any]:
    """Return curves of all methods, and the labels needed for accuracies that random choice reaches."""
    c = choose_penalty(*train, classes)
    curves = {
        method: [run_rounds(train, held, classes, method, budget, seed, c) for seed in range(seeds)]
        for method in METHODS
    }
    final = min(curve[-1] for curve in curves["random"])  # every seed of random choice reaches it
    start = max(curve[0] for curve in curves["random"])
    targets = [start + share * (final - start) for share in (0.5, 0.8, 0.95)]
    needed: dict[str, Any] = {}
    for method in METHODS:
        areas = [float(np.mean(m) - np.mean(r)) for m, r in zip(curves[method], curves["random"], strict=True)]
        needed[method] = {"mean_accuracy_gain": t_interval(areas) if method != "random" else None}
        for target in targets:
            counts = [count_labels(curve, target, classes, budget) for curve in curves[method]]
            base = [count_labels(curve, target, classes, budget) for curve in curves["random"]]
            ratios = [n / m for n, m in zip(counts, base, strict=True) if n is not None and m is not None]
            reached = [n for n in counts if n is not None]
            entry: dict[str, Any] = {"seeds": len(ratios)}
            if len(ratios) == seeds:  # otherwise the seeds that fail would be left out of the mean
                entry |= {"labels": float(np.mean(reached)), "of_random": t_interval(ratios)}
            needed[method][f"{target:.4f}"] = entry
    return {"budget": budget, "seeds": seeds, "c": c, "targets": targets, "needed": needed, "curves": curves}


def format_results(results: dict[str, Any]) -> list[str]:
    """Return the tables of the documentation."""
    lines = []
    for name, part in results["data"].items():
        for kind, seeds in part["suspects"].items():
            ours = [each["ours"] for each in seeds]
            rows = {"vitrail": ours}
            for peer in ("cleanlab_same_classifier", "cleanlab_same_mean"):
                if seeds[0][peer] is not None:
                    for method in ("prune_by_noise_rate", "confident_learning", "both"):
                        ranking = max(
                            "ap_self_confidence", "ap_margin", key=lambda k: np.mean([s[peer][k] for s in seeds])
                        )
                        rows[f"{peer} {method}"] = [each[peer][method] | {"ap": each[peer][ranking]} for each in seeds]
            lines.append(
                f"{name}, {kind}: {seeds[0]['flipped']} flipped; noise {[round(o['noise_rate'], 3) for o in ours]}"
            )
            # The average precision of cleanlab is that of its better ranking.
            for label, values in rows.items():
                means = {
                    key: np.mean([value[key] for value in values])
                    for key in ("listed", "precision", "recall", "f1", "ap")
                }
                spread = min(v["f1"] for v in values), max(v["f1"] for v in values)
                shown = "  ".join(f"{key} {value:.3f}" for key, value in means.items())
                lines.append(f"  {label:48} {shown}  f1 from {spread[0]:.3f} to {spread[1]:.3f}")
            base = [each["training"]["flipped"] for each in seeds]
            for label in ("flipped", "without_suspects", "suggested", "without_flipped", "true"):
                values = [each["training"][label] for each in seeds]
                mean, low, high = t_interval([v - b for v, b in zip(values, base, strict=True)])
                lines.append(
                    f"  {label:20} {100 * np.mean(values):.2f} %  {100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
                )
        chosen = part["next"]
        lines.append(f"{name}, {ROUNDS} rounds of {chosen['budget']}, {chosen['seeds']} seeds")
        for method, entry in chosen["needed"].items():
            for key, value in entry.items():
                if key != "mean_accuracy_gain" and "labels" not in value:
                    lines.append(f"  {method:20} accuracy {key}: reached by {value['seeds']} seeds only")
                elif key != "mean_accuracy_gain":
                    mean, low, high = value["of_random"]
                    ratio = f"{mean:.2f} of random ({low:.2f} to {high:.2f})"
                    counts = f"{value['labels']:.0f} labels, {ratio}, {value['seeds']} seeds"
                    lines.append(f"  {method:20} accuracy {key}: {counts}")
                elif value:
                    lines.append(
                        f"  {method:20} mean accuracy {100 * value[0]:+.2f} ({100 * value[1]:+.2f} to {100 * value[2]:+.2f})"
                    )
    return lines


def main() -> None:
    """Run all parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clothing", default=SHARED / "data/clothing", help="folder of the clothing photographs")
    parser.add_argument("--pets", default=SHARED / "data/pets", help="folder of the pets")
    model = SHARED / "weights/deit_tiny_patch16_224.safetensors"
    parser.add_argument("--model", default=model, help="checkpoint whose features are used")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of the flips [10]")
    parser.add_argument("--next-seeds", type=int, default=8, help="seeds of the rounds of choosing [8]")
    parser.add_argument("--out", type=Path, help="JSON file for all numbers [none]")
    options = parser.parse_args()
    model, start = open_features(str(options.model), Compute()), time.monotonic()
    results: dict[str, Any] = {"processor": processor_name(), "model": model.name, "data": {}}
    for name in ("clothing", "pets"):
        folder = str(getattr(options, name))
        train, held, classes, groups = read_data(name, folder, model)
        confusions = find_confusions(*train, classes)
        kinds = {
            kind: [
                measure_suspects(train, held, classes, groups, kind, seed, confusions) for seed in range(options.seeds)
            ]
            for kind in ("random", "confusion")
        }
        # 20 rounds use half of the training images.
        rounds = measure_next(train, held, classes, max(5, len(train[1]) // (2 * ROUNDS)), options.next_seeds)
        results["data"][name] = {"train": len(train[1]), "validation": len(held[1]), "classes": classes}
        results["data"][name] |= {"suspects": kinds, "next": rounds}
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    results["seconds"] = time.monotonic() - start
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    print(*format_results(results), sep="\n")


if __name__ == "__main__":
    main()
