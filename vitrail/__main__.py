"""`python -m vitrail`, and `torchrun -m vitrail` on many processes."""

from vitrail.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
