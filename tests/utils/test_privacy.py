"""What is private does not leave the machine: home, user, host, tokens, proxies, names of a cluster."""

import pytest

from vitrail.utils.privacy import HIDDEN, Redactor, select_variables

REDACTOR = Redactor("/home/alice", "alice", "workstation.example.org")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/.cache/vitrail", "~/.cache/vitrail"),
        ("a:/home/alice/x:/home/alice", "a:~/x:~"),
        ("/home/alicex/y", "/home/alicex/y"),
        ("/mnt/home/alice/y", "/mnt/home/~/y"),
        ("/scratch/alice/data", "/scratch/~/data"),
        ("owned by alice, not malice", "owned by ~, not malice"),
        ("tcp://workstation.example.org:29500", "tcp://<host>:29500"),
        ("workstation: no route", "<host>: no route"),
        ("workstations", "workstations"),
        ("401 for hf_abcdefghijklmnopqrstuvwxyz0123", "401 for <token>"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <token>"),
        ("https://bob:secret@mirror.example/x?token=abc&y=1", "https://mirror.example/x?token=<token>&y=1"),
        ("github_pat_11ABCDEFG0abcdefghijklmnop", "<token>"),
        ("PyTorch 2.13.0+cpu, AMD EPYC 9B14", "PyTorch 2.13.0+cpu, AMD EPYC 9B14"),
    ],
)
def test_private_text_is_replaced(text, shown):
    assert REDACTOR.clean(text) == shown


def test_values_of_lists_and_dictionaries_are_cleaned_and_numbers_stay():
    value = {"path": ["/home/alice/a", 3, None, True], "deep": ({"b": "alice"},)}
    assert REDACTOR.clean(value) == {"path": ["~/a", 3, None, True], "deep": [{"b": "~"}]}


def test_the_name_of_an_account_that_is_a_common_word_is_replaced_in_paths_only():
    redactor = Redactor("/root", "root", "localhost")
    assert redactor.clean("/root/x is not the root of /mnt/root/y") == "~/x is not the root of /mnt/~/y"
    assert redactor.clean("localhost") == "localhost"


def test_an_account_without_a_home_or_a_name_changes_nothing():
    assert Redactor("/", "", "").clean("/usr/lib and more") == "/usr/lib and more"


def test_variables_that_matter_are_shown_and_secrets_hidden():
    environment = {
        "OMP_NUM_THREADS": "8",
        "HTTPS_PROXY": "http://user:password@proxy.example:3128",
        "no_proxy": "internal.example",
        "HF_TOKEN": "hf_x",
        "WANDB_API_KEY": "x",
        "VITRAIL_TOKEN": "x",
        "VITRAIL_DATA": "/data",
        "SLURM_JOB_ACCOUNT": "physics",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "16",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_MEM_PER_NODE": "64G",
        "EDITOR": "vi",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    assert select_variables(environment) == {
        "OMP_NUM_THREADS": "8",
        "HTTPS_PROXY": HIDDEN,
        "no_proxy": HIDDEN,
        "HF_TOKEN": HIDDEN,
        "WANDB_API_KEY": HIDDEN,
        "VITRAIL_TOKEN": HIDDEN,
        "VITRAIL_DATA": "/data",
        "SLURM_JOB_ACCOUNT": HIDDEN,
        "SLURM_JOB_NODELIST": HIDDEN,
        "SLURM_NTASKS": "16",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_MEM_PER_NODE": "64G",
    }
