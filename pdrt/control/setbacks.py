"""What failed while a request was served, and was perhaps made up for elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.control.fleet import Choice
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.legs import Failure


@dataclass(slots=True)
class Setback:
    at: float
    choice: Choice  # that did not work out
    culprit: Instance
    failure: Failure

    def told(self, since: float) -> Json:
        choice, error = self.choice, self.failure.error
        return {
            "ms": round((self.at - since) * 1e3, 1),
            "prefill": choice.prefill.name if choice.prefill else None,
            "decode": choice.decode.name,
            "because": choice.because.told() if choice.because else None,
            "culprit": self.culprit.name,
            "code": error.code,
            "message": str(error),
            "stage": error.stage or None,
        }
