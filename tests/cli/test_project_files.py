"""The files of a new project; whole projects are trained in test_new.py."""

import ast

import pytest

from trainwright.cli.project_files import project_files


@pytest.mark.parametrize("api", ["config", "python"])
def test_the_files_are_programs_without_placeholders(api: str) -> None:
    files = project_files("my-project", "my_project", api)
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text, name)
        for placeholder in ("PROJECT", "PACKAGE", "DATASET", "ARGUMENTS", "CLASS_IMPORT", "COMMANDS", "RUN_FILE"):
            assert placeholder not in text
        assert max(map(len, text.splitlines()), default=0) <= 120
