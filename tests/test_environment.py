"""environment.yml asks conda for what pyproject.toml asks pip for, read as conda reads it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {"matplotlib": "matplotlib-base"}  # where conda-forge has another name than PyPI


def by_pip(pyproject: str) -> dict[str, SpecifierSet]:
    """Return conda-forge's name and the wanted versions of all that pip would install, Python included."""
    project = tomllib.loads(pyproject)["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    versions = {CONDA_NAMES.get(each.name, each.name): each.specifier for each in wanted}
    return {"python": SpecifierSet(project["requires-python"]), **versions}


def by_conda(environment: str) -> dict[str, SpecifierSet]:
    """Return name and wanted versions of all that conda would install for us."""
    lines = yaml.safe_load(environment)["dependencies"]
    specs = [MatchSpec(line, strict=True) for line in lines if isinstance(line, str) and line != "pip"]
    return {spec.name.normalized: SpecifierSet(str(spec.version or "")) for spec in specs}


def test_environment_is_the_project_s() -> None:
    environment = (ROOT / "environment.yml").read_text()
    assert by_conda(environment) == by_pip((ROOT / "pyproject.toml").read_text())


def test_environment_comes_from_conda_forge_and_installs_the_checkout() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"][-2:] == ["pip", {"pip": ["-e ."]}]


def test_a_difference_is_seen() -> None:
    environment = (ROOT / "environment.yml").read_text()
    wanted = by_pip((ROOT / "pyproject.toml").read_text())
    assert by_conda(environment.replace("joblib>=", "joblib>=9")) != wanted
    assert by_conda(environment.replace("  - joblib", "  - joblibs")) != wanted
