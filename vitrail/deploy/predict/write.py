"""Write the predictions of many images to a file, shared by several processes and resumable."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrail.data.dataset import Media
from vitrail.deploy.predict.formats import RowFormat
from vitrail.deploy.predict.inputs import ImageInputs
from vitrail.deploy.predict.parallel import output_width
from vitrail.deploy.predict.predict import RuntimePool, predict_rows
from vitrail.deploy.predict.processes import ProcessShare
from vitrail.deploy.predict.resume import PartialOutput, StreamOutput, partial_path
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.precision import current_precision, decided_precision, describe_precision
from vitrail.models.base import Model
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class Summary:
    """Summary of a run, for `--json`."""

    out: str
    images: int  # of this process
    errors: int  # of them, images without a prediction
    resumed: int  # rows of an earlier run
    seconds: float  # from the first image to the last
    images_per_second: float
    runtime: str
    precision: str
    batch: int  # final batch size
    workers: int
    rank: int = 0
    processes: int = 1
    whole: bool = True  # False while parts of other processes are missing
    part: str | None = None  # the file of this process, while parts are missing
    notes: tuple[str, ...] = ()
    media: Media = "image"  # what the images are

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes)}


class PredictionInterrupted(Exception):
    """Ctrl-C, raised after the finished rows are on disk."""

    def __init__(self, rows: int, count: int) -> None:
        super().__init__(f"{rows:,} of {count:,}")
        self.rows, self.count = rows, count


def write_outputs(
    pool: RuntimePool,
    inputs: ImageInputs,
    out: str,
    row_format: RowFormat,
    *,
    top: int = 1,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,  # other options that determine the rows
    share: ProcessShare = ProcessShare(),  # noqa: B008 (frozen)
    resume: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Summary:
    """Write a row for each image of this process's share to a file, or to standard output if `out` is "-"."""
    total, resumed = len(inputs) if limit is None else min(limit, len(inputs)), 0
    start, stop = share.index_range(total)
    deployed = pool.deployed
    width = output_width(deployed.runtime, deployed.contract.preprocessing)
    if out == "-":
        if share.world > 1:
            raise ValueError("several processes cannot share standard output: give --out FILE")
        sink = StreamOutput(row_format, total, width)
    else:
        identity = {"model": model_identity(deployed), "pictures": inputs.fingerprint(total), "processes": share.world}
        identity |= dict(options or {})
        sink = PartialOutput(Path(out), row_format, total, identity, rank=share.rank, world=share.world, width=width)
        sink.read_precision = lambda: decided_precision(deployed)
        resumed = sink.start(stop - start, resume=resume, force=force)
    start_time = time.perf_counter()
    try:
        for row in predict_rows(pool, inputs, start + resumed, stop, top, progress):
            sink.add(row)
        is_complete = sink.finish()
    except KeyboardInterrupt:
        sink.save()
        raise PredictionInterrupted(sink.rows, stop - start) from None
    finally:
        sink.close()  # a traceback may keep the sink, and its locks would refuse a resume in this process
    seconds, count = time.perf_counter() - start_time, stop - start
    speed = round(seconds, 3), round((count - resumed) / max(1e-9, seconds), 3)
    compute = deployed.runtime.name, current_precision(deployed), pool.batch_size.size, len(pool.runtimes)
    notes = (*inputs.notes, *deployed.notes, *describe_precision(deployed))
    part = None if is_complete else str(partial_path(Path(out), share.rank, share.world))
    work = share.rank, share.world, is_complete, part
    return Summary(out, count, sink.errors, resumed, *speed, *compute, *work, notes, inputs.media)


def compute_state_checksum(model: Model) -> str:
    """Return a checksum of the weights of a loaded model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {list(tensor.shape)}".encode() + tensor.cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def model_identity(deployed: DeployedModel) -> str:
    """Return a checksum of the weights, or of the exported file."""
    if deployed.model is not None or deployed.file is None:
        return deployed.contract.checksum
    digest = hashlib.sha256()
    for path in (Path(deployed.file), Path(deployed.file).with_suffix(".bin")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
