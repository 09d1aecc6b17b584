"""How the models of a service are opened, and opened once more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.deploy.opening import another, opened
from vitrail.deploy.runtime import Deployed, Gives, Runtime


@dataclass(frozen=True)
class Opening:
    """Opens models with the same options every time."""

    threads: int | None = None  # of each runtime
    options: Mapping[str, Any] = field(default_factory=dict)  # of `vitrail.deploy.opening.opened`

    def first(self, where: str) -> Deployed:
        """A model that answers with classes; one that has none, with features."""
        try:
            return self.for_(where, "logits")
        except ValueError:
            try:
                found = self.for_(where, "features")
            except ValueError:
                found = None
            if found is None or found.contract.labels is not None:
                raise
            return found

    def for_(self, where: str, gives: Gives, runtime: str | None = None) -> Deployed:
        """A model that gives these numbers, by the runtime that was chosen before."""
        chosen = {} if runtime is None else {"runtime": runtime}
        return opened(where, gives=gives, threads=self.threads, **{**self.options, **chosen})

    def another(self, deployed: Deployed) -> Runtime:
        """The same once more, for another thread."""
        return another(deployed, self.threads)
