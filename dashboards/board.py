"""What all dashboards share: variables, links to each other, and the agent's changes as annotations."""

from collections.abc import Sequence

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.panels import DATASOURCE, AnyPanel
from dashboards.queries import AGENT_STORE, STORE
from tiertune_connector.catalogue import PREFIX

TAG = "tiertune"
CHANGE = "tuner, store, tier, setting, change"
Rows = Sequence[tuple[str, Sequence[AnyPanel]]]
"""Titles of rows, and the panels in them."""


def board(name: str, title: str, description: str, rows: Rows) -> Dashboard:
    """One dashboard. Its uid follows from ``name`` and never changes: links and provisioning depend on it.

    Ids are 100 per row, so that a new panel leaves the links to other rows' panels alone.
    """
    made = Dashboard(f"TierTune: {title}").uid(f"tiertune-{name}").tags([TAG]).timezone("browser")
    made.description(description).readonly()
    made.time("now-1h", "now").refresh("30s").tooltip(DashboardCursorSync.CROSSHAIR)
    made.with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    made.with_variable(_choice("store", "Store"))
    made.with_variable(_choice("namespace", "Namespace", STORE))
    made.annotation(_moments("Changes by the agent", "applied", "blue"))
    made.annotation(_moments("Rolled back by the agent", "rolled_back", "red"))
    made.link(_others())
    for place, (row, panels) in enumerate(rows, 1):
        made.with_row(Row(row).id(100 * place))
        for position, panel in enumerate(panels, 1):
            made.with_panel(panel.id(100 * place + position))
    return made


def _choice(name: str, title: str, matcher: str = "") -> QueryVariable:
    """A choice of several or all values that the label ``name`` has on the counter of prompt tokens."""
    selector = f"{PREFIX}prompt_tokens_total" + (f"{{{matcher}}}" if matcher else "")
    everything = VariableOption(text="All", value="$__all", selected=True)
    variable = QueryVariable(name).label(title).datasource(DATASOURCE).query(f"label_values({selector}, {name})")
    variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)


def _moments(name: str, state: str, colour: str) -> AnnotationQuery:
    """Marks at the times that are the metric's values, in milliseconds, not at the times of scrapes.

    The query is given twice, as only recent versions of Grafana read it from ``target``.
    """
    expr = f'max by ({CHANGE}) ({PREFIX}agent_change_timestamp_seconds{{{AGENT_STORE}, state="{state}"}}) * 1000'
    query = AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour)
    query.expr(expr).target(Dataquery().ref_id("Anno").datasource(DATASOURCE).expr(expr).range())
    query.use_value_for_time(True).step("10s")
    return (
        query.title_format("{{store}} {{tier}}: {{setting}} {{change}}")
        .text_format("{{tuner}}")
        .tag_keys("tuner,store")
    )


def _others() -> DashboardLink:
    link = DashboardLink("TierTune").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)
