"""The examples: files that `config check` accepts, a unit that names what there is."""

import configparser
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.model.definition_file import load_definitions
from penstock.service.exit_codes import LATE

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("penstock-*.yaml"))


def test_there_is_one_for_each_way_to_run_it() -> None:
    assert {path.stem for path in FILES} == {"penstock-single", "penstock-edge", "penstock-cluster"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_check_accepts_it(path: Path) -> None:
    ran = CliRunner().invoke(main, ["config", "check", "-c", str(path)])
    assert ran.exit_code == 0, ran.output


def test_the_definitions_can_be_loaded() -> None:
    assert load_definitions(EXAMPLES / "definitions" / "services.yaml").metrics


def test_the_unit_gives_a_drain_the_time_that_it_needs_and_knows_our_exit_codes() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "penstock.service")
    service = unit["Service"]
    timeouts = [yaml.safe_load(path.read_text()).get("shutdown", {}).get("timeout", "30s") for path in FILES]

    assert int(service["TimeoutStopSec"]) > max(int(re.sub(r"\D", "", text)) for text in timeouts)
    assert service["SuccessExitStatus"] == str(LATE)
    assert service["StateDirectoryMode"] == "0700"
