"""Panels in one look: each has a description, a unit and the chosen data source; targets have refIds and legends."""

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, stat, statetimeline, timeseries, trend
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    StackingMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.queries import Query

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT, NUMBER_HEIGHT, WIDE = 8, 5, 12
CALM, GOOD, BAD = "text", "green", "red"
Colours = Sequence[tuple[float | None, str]]
"""From which value on which colour; the first value is None."""
PLAIN: Colours = ((None, CALM),)
GAIN: Colours = ((None, BAD), (0, GOOD))
"""Below 0 something is lost."""
AnyPanel = stat.Panel | statetimeline.Panel | timeseries.Panel | bargauge.Panel | trend.Panel
Panel = TypeVar("Panel", stat.Panel, statetimeline.Panel, timeseries.Panel, bargauge.Panel, trend.Panel)


def _filled(
    panel: Panel, title: str, unit: str, description: str, queries: Sequence[Query], *, span: int, colours: Colours
) -> Panel:
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE).span(span).height(HEIGHT)
    steps = [Threshold(value=value, color=colour) for value, colour in colours]
    panel.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(_target(ref_id, query.expr, query.legend or title).range())
    return panel


def _target(ref_id: str, expression: str, legend: str) -> Dataquery:
    return Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(expression).legend_format(legend)


def _whole(query: Query) -> Dataquery:
    """A target with one value for all the time shown."""
    return _target("A", query.expr.replace("$__rate_interval", "$__range"), query.legend).instant()


def number(
    title: str, unit: str, description: str, query: Query, *, span: int = 4, colours: Colours = PLAIN
) -> stat.Panel:
    """One figure: the last value, with its course behind it."""
    panel = _filled(stat.Panel(), title, unit, description, [query], span=span, colours=colours)
    panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"])).no_value("no data")
    return panel.height(NUMBER_HEIGHT)


def lines(title: str, unit: str, description: str, *queries: Query, span: int = WIDE) -> timeseries.Panel:
    legend = VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = _filled(timeseries.Panel(), title, unit, description, queries, span=span, colours=PLAIN)
    return panel.legend(legend).show_points(VisibilityMode.NEVER)


def stacked(title: str, unit: str, description: str, *queries: Query, span: int = WIDE) -> timeseries.Panel:
    """Parts of a whole, on top of each other."""
    panel = lines(title, unit, description, *queries, span=span)
    return panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40).min(0)


def steps(title: str, unit: str, description: str, *queries: Query, span: int = WIDE) -> timeseries.Panel:
    """Stepped lines, for what changes seldom and abruptly."""
    return lines(title, unit, description, *queries, span=span).line_interpolation(LineInterpolation.STEP_AFTER)


def states(
    title: str, description: str, words: Mapping[str, str], *queries: Query, span: int = WIDE
) -> statetimeline.Panel:
    """A row per series; ``words`` are the names of the values 1, 2, ... and their colours."""
    panel = _filled(statetimeline.Panel(), title, "none", description, queries, span=span, colours=PLAIN)
    told = {
        str(value): ValueMappingResult(text=word, color=colour, index=value - 1)
        for value, (word, colour) in enumerate(words.items(), 1)
    }
    return panel.mappings([ValueMap(options=told)])


def bars(title: str, unit: str, description: str, query: Query) -> bargauge.Panel:
    """A bar per series, over all the time shown."""
    panel = _filled(bargauge.Panel(), title, unit, description, (), span=WIDE, colours=PLAIN)
    panel.with_target(_whole(query)).reduce_options(ReduceDataOptions().calcs(["lastNotNull"])).orientation(
        VizOrientation.HORIZONTAL
    )
    panel.display_mode(BarGaugeDisplayMode.BASIC).min(0).no_value("no data")
    return panel.max(1) if unit == "percentunit" else panel


def curve(title: str, unit: str, description: str, query: Query, *, x_label: str) -> trend.Panel:
    """A line over all the time shown; x is the number in a label, the only one that the query has."""
    panel = _filled(trend.Panel(), title, unit, description, (), span=WIDE, colours=PLAIN)
    panel.with_target(_whole(query).format(PromQueryFormat.TABLE)).x_field(x_label)
    number = {"targetField": x_label, "destinationType": "number"}
    for name, options in (
        ("convertFieldType", {"conversions": [number], "fields": {}}),
        ("sortBy", {"fields": {}, "sort": [{"field": x_label}]}),
        ("organize", {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {"Value": query.legend}}),
    ):
        panel.with_transformation(DataTransformerConfig(id_val=name, options=options))
    return panel.min(0).override_by_name(x_label, [DynamicConfigValue(id_val="unit", value="bytes")])
