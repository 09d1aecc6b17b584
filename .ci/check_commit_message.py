"""Check a commit message: a subject of at most 72 characters, then a blank line before any body."""

import sys
from pathlib import Path

LONGEST = 72
# git commit --verbose writes a diff below this line.
SCISSORS = "# ------------------------ >8 ------------------------"


def find_fault(message: str) -> str | None:
    """Return what is wrong with a commit message in one line, or None."""
    written = message.split(SCISSORS)[0].splitlines()
    lines = "\n".join(line for line in written if not line.startswith("#")).strip("\n").split("\n")
    subject = lines[0].rstrip()
    if len(subject) > LONGEST:
        return f"the subject must have at most {LONGEST} characters, got {len(subject)}: {subject}"
    if len(lines) > 1 and lines[1].strip():
        return f"a blank line must follow the subject, got: {lines[1]}"
    return None


if __name__ == "__main__":
    if fault := find_fault(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(f"error: {fault}")
