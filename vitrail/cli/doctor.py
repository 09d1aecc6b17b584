"""Examine the installation and the machine: problems first, each with a remedy, then all facts and a self-test.

The self-test takes about a minute: it trains a tiny model on the digits, kills and resumes the run and compares the weights bit
for bit, trains with two processes, and measures loading, matrix products, ViT-S/16 and the bandwidth between processes. Each
step has a time limit, a step that fails does not stop the others, and Ctrl-C prints what is known. Under torchrun or srun the
bandwidth is that between their processes. With --quick the self-test is left out. A PyTorch that does not import is a
problem in the list, not an error of the command.

Nothing private is printed: home directory and user name are ~, the host name, tokens and proxies are left out. So
`vitrail doctor --json` can be attached to a bug report. The exit code is 0 if all is well, 1 after an error or a failed test.

examples:
  vitrail doctor                                        facts, problems, self-test
  vitrail doctor --quick                                without the self-test, a few seconds
  vitrail doctor --test loader,vit                      these steps of the self-test only
  vitrail doctor --out doctor.html --out doctor.json    a page, and a file for a bug report
  torchrun --nproc-per-node 8 -m vitrail doctor --test collectives
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from vitrail.cli.options import CommandParser, parse_names, print_result
from vitrail.cli.text.progress import StatusDisplay
from vitrail.doctor import STEP_NAMES

if TYPE_CHECKING:
    from vitrail.doctor.diagnosis import Diagnosis
    from vitrail.doctor.selftest import SelfTest

FORMATS = (".html", ".json")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail doctor`."""
    tests = parser.add_group("self-test").add_mutually_exclusive_group()
    tests.add_argument("--quick", action="store_true", help="leave out the self-test")
    tests.add_argument(
        "--test",
        metavar="NAME,…",
        type=parse_steps,
        default=STEP_NAMES,
        help=f"steps of the self-test: {', '.join(STEP_NAMES)} [all that apply]",
    )
    parser.add_option("--step-timeout S", "time limit of each step, in seconds [120 to 300]", parse_timeout)
    out = "page (.html) or data (.json) to write (repeatable) [none]"
    parser.add_option("--out FILE", out, parse_output, action="append", default=[])
    parser.add_shared("--json")


def parse_steps(text: str) -> tuple[str, ...]:
    """Return names of steps."""
    return parse_names(text, STEP_NAMES, "step")


def parse_timeout(text: str) -> float:
    """Return a time limit above 0 seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds > 0, got {text!r}")
    return seconds


def parse_output(text: str) -> Path:
    """Return the path of a page or of a JSON file."""
    if Path(text).suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(FORMATS)}")
    return Path(text)


def run(options: argparse.Namespace) -> int:
    """Examine, print and write; return 1 if something does not work, 130 after Ctrl-C."""
    from vitrail.cli.text.doctor import format_diagnosis
    from vitrail.doctor.diagnosis import collect_facts, redact
    from vitrail.doctor.problems import list_problems
    from vitrail.utils.environment import find_group

    for path in options.out:
        if not path.parent.is_dir():
            raise ValueError(f"there is no directory {path.parent} for --out {path.name}")
    group = find_group()
    if group is not None and group.get("RANK", "0") != "0":
        return join_tests(options, group)
    display = StatusDisplay(quiet=not sys.stderr.isatty())
    code = 0
    display.show_status("examining the installation and the machine")
    facts = collect_facts()
    facts["problems"] = list_problems(facts, os.environ)
    if not options.quick:
        tests = build_tests(options, facts, group)
        try:
            run_tests(tests, facts, display)
        except KeyboardInterrupt:
            code = 130
        facts["tests"] = tests.results
    display.clear()
    failed = any(test["status"] in ("failed", "timeout") for test in facts["tests"])
    facts["ok"] = not failed and not any(problem["severity"] == "error" for problem in facts["problems"])
    shown = redact(facts)
    print_result(options, shown, format_diagnosis(shown))
    write_outputs(options.out, shown)
    if options.out and not options.json:
        print("", *(f"written: {path}" for path in options.out), sep="\n")
    return code or int(not facts["ok"])


def build_tests(options: argparse.Namespace, facts: "Diagnosis", group: dict[str, str] | None) -> "SelfTest":
    """Return the self-test on the device that a run would use."""
    from vitrail.doctor.selftest import SelfTest

    return SelfTest(options.test, device=facts["device"]["name"] or "cpu", group=group, limit=options.step_timeout)


def run_tests(tests: "SelfTest", facts: "Diagnosis", display: StatusDisplay) -> None:
    """Run the self-test with a status line on a terminal, and with a line for each step elsewhere."""
    torch = facts["software"]["torch"]
    if "error" in torch or "crash" in torch:
        tests.skip("PyTorch does not work")
        return

    def report(number: int, count: int, name: str, text: str) -> None:
        line = f"self-test {number} of {count}, {name}: {text}"
        if display.terminal:
            display.show_status(line)
        elif text == tests.steps[name].title:
            print(line, file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGTERM, raise_exit)
    try:
        tests.run(report)
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_exit(number: int, _: FrameType | None) -> NoReturn:
    """Exit for a signal, so that the processes and files of the self-test are removed."""
    raise SystemExit(128 + number)


def join_tests(options: argparse.Namespace, group: dict[str, str]) -> int:
    """Take part in the steps of all processes, as one that is not the first and prints nothing."""
    from vitrail.doctor.probe import run_probe
    from vitrail.doctor.selftest import STEPS, SelfTest

    names = [] if options.quick else [name for name in options.test if STEPS[name].in_group]
    if not names or "error" in (torch := run_probe()):
        return 0
    SelfTest(names, device=torch.get("device") or "cpu", group=group, limit=options.step_timeout).run()
    return 0  # the first process has the result


def write_outputs(paths: list[Path], facts: "Diagnosis") -> None:
    """Write the pages and JSON files."""
    from vitrail.utils.files import atomic_write

    for path in paths:
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n" if path.suffix == ".json" else build_page(facts)
        with atomic_write(path) as file:
            file.write(text.encode("utf-8"))


def build_page(facts: "Diagnosis") -> str:
    """Return the page, which needs a NumPy that imports."""
    try:
        from vitrail.doctor.page import render_page
    except ImportError as error:
        raise ValueError(f"the page cannot be drawn ({error}): give --out FILE.json") from None
    return render_page(facts)
