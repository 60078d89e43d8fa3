"""Hours of the week in which nothing changes. Pure: the time is an argument."""

import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BeforeValidator, Field, field_validator

from tiertune_connector.documents import Document

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)
_CLOCK = r"^\d\d:\d\d(:\d\d)?$"


def _clock_time(value: object) -> time:
    """Parse a time of day without an offset, which would be ignored: a freeze has its ``zone``."""
    if not isinstance(value, str) or not re.fullmatch(_CLOCK, value):
        raise ValueError('write a time in quotes, as "18:00"')
    return time.fromisoformat(value)


ClockTime = Annotated[time, BeforeValidator(_clock_time, json_schema_input_type=Annotated[str, Field(pattern=_CLOCK)])]
"""A time of day, written as ``"18:00"``."""


class FreezeTimes(Document):
    """Hours in which nothing changes. ``to`` at or before ``from`` means on the day after."""

    days: tuple[Day, ...] = Field(default=DAYS, min_length=1)
    """Days on which it begins."""
    start: ClockTime = Field(alias="from")
    """When it begins, in quotes: ``"18:00"``."""
    end: ClockTime = Field(alias="to")
    """When it ends; if at or before ``from``, on the next day."""
    zone: str = "UTC"
    """Name of the time zone, such as ``Europe/Zurich``."""

    @field_validator("zone")
    @classmethod
    def _known(cls, value: str) -> str:
        zone(value)
        return value

    @property
    def endless(self) -> bool:
        """Whether each day's freeze ends as the next one begins."""
        return self.start == self.end and set(self.days) == set(DAYS)

    def ends(self, now: datetime) -> datetime | None:
        """When the freeze that ``now`` lies in ends; None: it lies in none."""
        local = now.astimezone(zone(self.zone))
        for day in (local.date(), local.date() - timedelta(days=1)):
            start = datetime.combine(day, self.start, local.tzinfo)
            end = datetime.combine(day + timedelta(days=self.end <= self.start), self.end, local.tzinfo)
            end = end.replace(fold=1)  # clocks that are set back show it twice: it lasts from the first to the second
            between = start <= local < end or start.astimezone(UTC) <= now < end.astimezone(UTC)
            if DAYS[day.weekday()] in self.days and between:
                return end
        return None


@lru_cache(maxsize=64)
def zone(name: str) -> tzinfo:
    """A time zone; UTC also where the system has no zone files."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone is called {name!r}: write one such as Europe/Zurich, or UTC") from error
