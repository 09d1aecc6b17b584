"""Removal of what is private from facts that are shown to others: home directory, user, host, tokens, proxies."""

import getpass
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "set, not shown"
TOKEN = "<token>"
# Variables that change what vitrail and its libraries do.
PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_", "TORCH", "PYTORCH_", "CUDA_")
PREFIXES += ("CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "NCCL_", "GLOO_", "UCX_", "SLURM_", "HF_", "HUGGINGFACE_")
PREFIXES += ("TRANSFORMERS_", "WANDB_", "MLFLOW_", "VITRAIL_")
NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "XDG_CACHE_HOME",
    "TMPDIR",
}
NAMES |= {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "NO_COLOR"}
PROXIES = {"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"}
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY$|AUTH|COOKIE", re.IGNORECASE)
# SLURM names users, accounts, hosts and jobs; its counts say how the process was started.
COUNTS = re.compile(r"[\d.,x()*:-]*[KMGT]?")
SECRETS = re.compile(
    r"\bhf_\w{16,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bsk-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|\b[0-9a-f]{40}\b"
)
BEARER = re.compile(r"(?i)\b(bearer |(?:token|password|secret|api_?key)=)[^\s&'\"]+")
ADDRESS_USER = re.compile(r"(?<=://)[^/\s@]+@")
# Names of accounts that many people have, which are also words of reports.
COMMON_USERS = {"root", "user", "ubuntu", "debian", "admin", "runner", "nobody", "vitrail", "python", "torch", "app"}


def select_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that matter, by name; the values of secrets, proxies and SLURM's names are not shown."""
    selected = {}
    for name, value in sorted(environment.items()):
        if name.lower() in PROXIES:
            selected[name] = HIDDEN
        elif name in NAMES or name.startswith(PREFIXES):
            hides = SECRET_NAME.search(name) or (name.startswith("SLURM_") and not COUNTS.fullmatch(value))
            selected[name] = HIDDEN if hides else value
    return selected


class Redactor:
    """Replacement of private text: the home directory and the user by ~, the host by <host>, tokens by <token>."""

    def __init__(self, home: str | None = None, user: str | None = None, host: str | None = None) -> None:
        self.home = os.path.normpath(find_home() if home is None else home)
        user = find_user() if user is None else user
        host = platform.node() if host is None else host
        rules: list[tuple[re.Pattern[str], str]] = [(SECRETS, TOKEN), (BEARER, rf"\1{TOKEN}"), (ADDRESS_USER, "")]
        if len(Path(self.home).parts) > 1:  # not / itself
            rules.append((re.compile(rf"(?<![\w.-]){re.escape(self.home)}(?!\w)"), "~"))
        if user:
            whole = r"(?<=[/\\]){}(?=[/\\]|$)" if user in COMMON_USERS or len(user) < 3 else r"(?<!\w){}(?!\w)"
            rules.append((re.compile(whole.format(re.escape(user))), "~"))
        for name in dict.fromkeys((host, host.partition(".")[0])):
            if len(name) > 2 and name != "localhost":
                rules.append((re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), "<host>"))
        self.rules = rules

    def clean(self, value: Any) -> Any:
        """Return text without what is private; likewise the values of lists and dictionaries."""
        if isinstance(value, str):
            for pattern, replacement in self.rules:
                value = pattern.sub(replacement, value)
            return value
        if isinstance(value, Mapping):
            return {key: self.clean(part) for key, part in value.items()}
        return [self.clean(part) for part in value] if isinstance(value, (list, tuple)) else value


def find_home() -> str:
    """Return the home directory; / if the account has none."""
    try:
        return str(Path.home())
    except RuntimeError:
        return "/"


def find_user() -> str:
    """Return the name of the account, "" if it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
