"""Is a tier written for nothing? Where it is full and hardly anything is found there. It only recommends."""

from typing import ClassVar

from pydantic import Field

from tiertune_agent.fields import read
from tiertune_agent.records import Windows
from tiertune_agent.tuners.admission import is_full, passed
from tiertune_agent.tuners.base import Answer, Current, NoChange, Period, Proposal, Tuner, TunerSettings
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Summand, ratio
from tiertune_connector.tuning import SLOWER
from tiertune_connector.units import format_duration, format_size


class WriteOffSettings(TunerSettings):
    advisory: ClassVar = True

    period: Period = 3600.0
    least_found: float = Field(default=0.02, ge=0.0, le=1.0)
    """Bytes found in the tier per byte written there: less is written for nothing."""


class WriteOff(Tuner):
    """What is off is never found to pay again, for nothing tells it: people decide, and look again."""

    name = "write_off"
    key = "write_off"
    scope = "store"
    tiers = SLOWER
    settings: WriteOffSettings

    def evaluate(self, history: Windows, current: Current) -> Answer:
        tier = current.target.tier
        field = f"tiers.{tier}.write"
        now = read(current.tuning, field)
        if now == "off":
            return NoChange(f"nothing is written to {tier}")
        passages = passed(history, tier)
        seconds = sum(seen.seconds for seen in passages)
        written = sum(seen.written_bytes for seen in passages)
        if len(passages) < ENOUGH_WINDOWS or seconds < self.settings.period or not written:
            return NoChange(
                f"{now} stays, not enough data: {format_size(written)} were written to {tier} in "
                f"{format_duration(seconds)} that are known, {format_duration(self.settings.period)} are needed"
            )
        found = ratio([Summand(seen.asked_bytes, seen.written_bytes) for seen in passages])
        told = (
            f"{format_size(written)} were written to {tier} in {format_duration(seconds)}, and requests found "
            f"{found.value:.1%} of that there (standard error {found.error:.1%})"
        )
        evidence = {"written_bytes": written, "seconds": seconds, **found.document("found")}
        if not is_full(current, tier, passages):
            return NoChange(f"{now} stays: {told}; there is room, and it may be found later", evidence)
        if found.value + ERRORS * found.error >= self.settings.least_found:
            return NoChange(f"{now} stays: {told}; {self.settings.least_found:.1%} is enough", evidence)
        requests = int(sum(window.total("requests_total") for window in history))
        return Proposal(field, now, "off", f"{told}, while the tier is full", evidence, requests)
