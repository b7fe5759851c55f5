"""The chart of dist/ as Helm renders it, and what Kubernetes' own schemas say of that. No cluster is asked."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.packages.tools import ask

Document = dict[str, Any]
RENDER = """
import helm_python
answers = []
with helm_python.Chart.load(question["chart"]) as chart:
    for values in question["values"]:
        try:
            rendered = chart.render(values, name=question["name"], namespace=question["namespace"])
            answers.append({"rendered": rendered})
        except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
            answers.append({"refused": str(error)})
json.dump(answers, sys.stdout)
"""
RENDER_NOTES = """
import helm_python
with helm_python.Chart.load(question["chart"]) as chart:
    json.dump(chart.render(question["values"])["kvpool/templates/NOTES.txt"], sys.stdout)
"""
DEFAULTS = """
import helm_python
with helm_python.Chart.load(question) as chart:
    json.dump([chart.values, chart.schema, chart.metadata], sys.stdout)
"""
LINT = """
import helm_python
json.dump([helm_python.lint(question["chart"], values, strict=True) for values in question["values"]], sys.stdout)
"""
# Strictly: a field that a type does not have is a fault. The types of Prometheus have models; what they drop is none of theirs.
VALIDATE = """
import kubernetes_validate
from cloudcoil.models.prometheus_operator import v1
faults = []
for document in question["documents"]:
    try:
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            known = getattr(v1, document["kind"]).model_validate(document)
            assert json.loads(known.model_dump_json(by_alias=True, exclude_unset=True)) == document, known
        else:
            kubernetes_validate.validate(document, question["version"], strict=True)
    except Exception as fault:
        faults.append(f"{document['kind']}: {fault}")
json.dump(faults, sys.stdout)
"""


def render(chart: Path, values: Mapping[str, Any], name: str = "kvpool", namespace: str = "llm") -> list[Document]:
    """The documents of a release. Raises AssertionError where its values are refused."""
    return render_all(chart, [values], name, namespace)[0]


def render_all(
    chart: Path, each: Sequence[Mapping[str, Any]], name: str = "kvpool", namespace: str = "llm"
) -> list[list[Document]]:
    """The documents of many releases, each with values of its own."""
    releases = []
    for answer in _answers(chart, each, name, namespace):
        assert "rendered" in answer, answer["refused"]
        manifests = (text for file, text in sorted(answer["rendered"].items()) if file.endswith(".yaml"))
        releases.append([document for text in manifests for document in yaml.safe_load_all(text) if document])
    return releases


def refusal(chart: Path, values: Mapping[str, Any]) -> str:
    """What Helm says of values that it refuses."""
    answer = _answers(chart, [values], "kvpool", "llm")[0]
    assert "refused" in answer, "no fault is found in the values"
    return str(answer["refused"])


def _answers(chart: Path, each: Sequence[Mapping[str, Any]], name: str, namespace: str) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = ask(
        RENDER, {"chart": str(chart), "values": each, "name": name, "namespace": namespace}
    )
    return answers


def faults(documents: Iterable[Document], version: str) -> list[str]:
    """What that version of Kubernetes says of documents that are not of their type."""
    found: list[str] = ask(VALIDATE, {"documents": list(documents), "version": version})
    return found


def one(documents: Iterable[Document], kind: str, name: str = "") -> Document:
    """The document of a kind, and of a name where one is given."""
    found = [each for each in documents if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} documents are a {kind} {name}"
    return found[0]
