"""Dashboards are what Grafana's own types say a dashboard is: checked by the TypeScript compiler."""

import json
import re
import shutil
import subprocess

import pytest

from e2e.promql import DASHBOARDS

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

PACKAGES = ("@grafana/schema@13.2.3", "typescript@7.0.2")
OPTIONS = {
    "strict": True,
    "noEmit": True,
    "module": "esnext",
    "moduleResolution": "bundler",
    "skipLibCheck": True,
    "target": "es2022",
    "types": [],
}
# An enum refuses the literal that it stands for: the mapping lets it pass, and nothing else.
CHECK = """import type {{ Dashboard }} from "@grafana/schema";
type Plain<T> = T extends string ? `${{T}}` : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
export const dashboard: Plain<Dashboard> = {document};
"""
QUERY = {"expr", "instant", "range"}
"""Of an annotation's query: what it asks a data source is not in the type."""
ANNOTATION = {"expr", "step", "tagKeys", "textFormat", "titleFormat", "useValueForTime"}
"""What Prometheus's annotations have beyond those of every data source: the SDK knows them, the type does not."""
INTERVAL = {"auto", "auto_count", "auto_min"}
"""The SDK writes them into every variable, the type has them in none but those of intervals."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Compiles a text of TypeScript; returns the compiler's complaints."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("types")
    if npm is None:
        pytest.skip("npm is not installed (Debian package npm)")
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", *PACKAGES]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not get the types of Grafana within 3 minutes")
    if done.returncode:
        pytest.skip(f"npm cannot get the types of Grafana: {(done.stderr.splitlines() or ['?'])[-1][:200]}")
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS, "files": ["check.ts"]}))

    def compiled(text):
        (folder / "check.ts").write_text(text)
        checked = [folder / "node_modules" / ".bin" / "tsc", "--pretty", "false", "-p", folder]
        return subprocess.run(checked, capture_output=True, text=True, timeout=600, check=False).stdout

    return compiled


def typed(document):
    """Without the keys that the types do not have though Grafana does."""
    for part, keys in (
        *((annotation["target"], QUERY) for annotation in document["annotations"]["list"]),
        *((annotation, ANNOTATION) for annotation in document["annotations"]["list"]),
        *((variable, INTERVAL) for variable in document["templating"]["list"]),
    ):
        for key in keys:
            del part[key]
    return document


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_has_grafanas_type(compiler, path):
    """No key is unknown, none has a wrong type."""
    assert compiled_errors(compiler, typed(json.loads(path.read_text()))) == []


@pytest.mark.parametrize(("key", "value"), [("refresh", 30), ("titel", "misspelt")])
def test_the_check_finds_a_wrong_type_and_an_unknown_key(compiler, key, value):
    """Otherwise the test above would prove nothing."""
    assert compiled_errors(compiler, {**typed(json.loads(DASHBOARDS[0].read_text())), key: value})


def compiled_errors(compiler, document):
    text = compiler(CHECK.format(document=json.dumps(document)))
    return [line for line in text.splitlines() if re.search(r"error TS\d+", line)]
