"""The dashboards without Grafana: each panel's real result, drawn on a page of our own."""
