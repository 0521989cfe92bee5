"""docs/grafana_dashboard.json asks for what a run serves, and for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from pipeline.facts.stats import GoodputFigures
from pipeline.observe.prometheus import joined
from tests.pipeline.observe.test_prometheus import facts

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana_dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(expression, labels that its legend shows)."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    yield DASHBOARD["templating"]["list"][1]["query"]["query"], ""


async def test_every_metric_and_label_of_the_dashboard_is_served() -> None:
    made_up = facts(engines={"engine-0": None})
    measured = replace(made_up, run=replace(made_up.run, goodput=GoodputFigures(0.5, 0.75)))
    text = await joined(measured, MagicMock())
    served = {name: set(re.findall(r'(\w+)="', labels)) for name, labels in re.findall(r"^(\w+)(\{.*\})? ", text, re.M)}
    for expression, legend in queries():
        (name,) = re.findall(r"\bsluice_\w+", expression)
        assert name in served, expression
        assert set(re.findall(r"{{(\w+)}}", legend)) <= served[name], (name, legend)
        assert set(re.findall(r"(\w+)=\"", expression)) <= served[name], expression
        assert name.endswith("_total") or "rate(" not in expression, "the rate of what is no counter"


def test_panels_have_numbers_and_places_of_their_own() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert all('instance=~"$instance"' in target["expr"] for panel in PANELS for target in panel["targets"])
