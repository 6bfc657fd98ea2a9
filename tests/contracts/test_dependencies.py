"""The lower bounds in setup.py are those that `make test-lowest` tests."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
# Old versions of RETURNN go from the package index; the others are tools.
UNTESTED = {"returnn", "ruff", "setuptools"}


def test_lowest_versions_are_those_of_setup():
    call = ast.parse((ROOT / "setup.py").read_text()).body[-1].value
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(options["extras_require"])
    wanted = [*ast.literal_eval(options["install_requires"]), *extras["build"], *extras["test"]]
    bounds = dict(re.fullmatch(r"([a-z0-9-]+)(?:\[.*\])?>=(.+)", item).groups() for item in wanted)
    lines = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert bounds.keys() - UNTESTED == tested.keys()
    for name, version in tested.items():
        assert f"{version}.".startswith(f"{bounds[name]}."), name
