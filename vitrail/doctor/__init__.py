"""The doctor: facts about an installation and its machine, problems with remedies, and a self-test.

Nothing here imports PyTorch in the process of the command, because a PyTorch that does not import is what it has to report.
`probe.py` and `worker.py` run as processes of their own, and only `worker.py` imports the modules `*_steps.py`.
"""

# Steps of the self-test, in order; `selftest.py` has what they do.
STEP_NAMES = ("resume", "ddp", "loader", "matmul", "vit", "collectives", "copies", "imports")
