"""The labelling loop: find wrong labels, propose labels, choose images to label, apply decisions, exchange files.

The names here are also those of the command line, whose help does not import PyTorch.
"""

# Which images to label next; the first is the default.
METHODS = ("uncertain-diverse", "margin", "entropy", "k-center", "k-means++", "random")
# Files of labels, and how a person would call them.
FORMATS = {
    "csv": "path,label,split: what `vitrail train` reads",
    "coco": "COCO JSON, a category for each image",
    "label-studio": "tasks of Label Studio, JSON, with the labelling interface beside them",
    "fiftyone": "directory of a FiftyOneImageClassificationDataset: labels.json and data.json",
    "fiftyone-dataset": "directory of a FiftyOneDataset: metadata.json and samples.json",
}
UNDECIDED = ("keep", "accept", "remove")  # what is done with a row without a decision
DEFAULT_MODEL = "deit-tiny"  # of `vitrail models`
