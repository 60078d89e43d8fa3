"""Panels and rows in one look: every panel has an id, a description and the chosen data source; targets have refIds."""

from collections.abc import Sequence
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, LineInterpolation, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh, VariableSort

from dashboards.queries import PREFIX, Query

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
Panel = TypeVar("Panel", stat.Panel, statetimeline.Panel, timeseries.Panel)


def _filled(panel: Panel, title: str, unit: str, description: str, queries: Sequence[Query], *, span: int) -> Panel:
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE).span(span).height(HEIGHT)
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        target = Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(query.expr).range()
        panel.with_target(target.legend_format(query.legend or "__auto"))
    return panel


def number(title: str, unit: str, description: str, query: Query, span: int = 6) -> stat.Panel:
    """One figure: the last value, with its course behind it."""
    panel = _filled(stat.Panel(), title, unit, description, [query], span=span)
    return panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"])).no_value("no data")


def lines(title: str, unit: str, description: str, *queries: Query, span: int = 12) -> timeseries.Panel:
    legend = VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    return _filled(timeseries.Panel(), title, unit, description, queries, span=span).legend(legend)


def stacked(title: str, unit: str, description: str, *queries: Query, span: int = 12) -> timeseries.Panel:
    """Parts of a whole, on top of each other."""
    panel = lines(title, unit, description, *queries, span=span)
    return panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)


def steps(title: str, unit: str, description: str, *queries: Query, span: int = 12) -> timeseries.Panel:
    """Lines of what changes seldom and at once."""
    return lines(title, unit, description, *queries, span=span).line_interpolation(LineInterpolation.STEP_AFTER)


def states(title: str, description: str, *queries: Query, span: int = 12) -> statetimeline.Panel:
    return _filled(statetimeline.Panel(), title, "none", description, queries, span=span)


def add_row(
    dashboard: Dashboard, number_of_row: int, title: str, *panels: stat.Panel | statetimeline.Panel | timeseries.Panel
) -> None:
    """A row and its panels; ids are 100 per row, so that a new panel leaves the other rows' links alone."""
    dashboard.with_row(Row(title).id(100 * number_of_row))
    for position, panel in enumerate(panels, start=1):
        dashboard.with_panel(panel.id(100 * number_of_row + position))


def datasource_variable() -> DatasourceVariable:
    return DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, title: str, metric: str, matcher: str = "") -> QueryVariable:
    """A choice, several or all, among the values of the label ``name`` of a metric."""
    selector = f"{PREFIX}{metric}{{{matcher}}}" if matcher else f"{PREFIX}{metric}"
    everything = VariableOption(text="All", value="$__all", selected=True)
    variable = QueryVariable(name).label(title).datasource(DATASOURCE).query(f"label_values({selector}, {name})")
    variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
