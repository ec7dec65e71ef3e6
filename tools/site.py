"""Hooks of mkdocs: pages of the API reference from the package's docstrings, and links to files of the repository.

A link from a page to a file outside ``docs`` leads to a copy of it in the site; of one to a folder the text is left.
"""

import io
import posixpath
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from trainwright.cli.main import main

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PACKAGES = {
    "trainwright": "The names that most programs need",
    "trainwright.config": "Configurations",
    "trainwright.data": "Data sets, samplers and loaders",
    "trainwright.engine": "Trainers",
    "trainwright.hooks": "Hooks and callbacks",
    "trainwright.events": "Metrics of a run, and where they are written",
    "trainwright.evaluation": "Evaluators and metrics",
    "trainwright.optim": "Optimizers and schedules",
    "trainwright.checkpoint": "Checkpoints",
    "trainwright.parallel": "Processes, devices and layouts",
    "trainwright.models": "Models",
    "trainwright.ops": "Operators",
}
SCHEMAS = {"config": "config files in YAML", "python": "the settings of TrainingConfig, in YAML or JSON"}
SCHEMA_PAGE = """# JSON schemas for editors

{lines}

The first line of a YAML file names the schema, by its address or by the path of a copy:
`# yaml-language-server: $schema=config.json`. `trainwright config schema` writes that of the installed version.
"""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[\w./-]+)(?P<anchor>#[^)\s]*)?\)")

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?\.?([^`]*)`")
DOCTEST = re.compile(r"(?m)^( *)>>> .*(?:\n(?! *$).*)*")


class PlainDocstrings(griffe.Extension):
    """Docstrings as Markdown: roles of Sphinx become names, doctests become blocks of code."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)


def on_config(config: Any) -> Any:
    """Add the reference and the decisions to the navigation, which has all other pages."""
    missing = [page.name for page in DOCS.glob("*.md") if page.name not in str(config.nav)]
    assert not missing, f"mkdocs.yml: no place in nav for {missing}"
    decisions = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("decisions/*.md"))
    config.nav += [
        {"Reference": [*({name: f"reference/{name}.md"} for name in PACKAGES), "reference/schemas.md"]},
        {"Decisions": decisions},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and the files of the repository that pages link to."""
    package: Any = griffe.load("trainwright", search_paths=[REPOSITORY])
    for name, title in PACKAGES.items():
        found = package if name == "trainwright" else package[name.removeprefix("trainwright.")]
        names = [key for key, member in found.members.items() if member.is_alias and not key.startswith("_")]
        public = [key for key in names if _is_documented(found.members[key])]
        assert public, f"{name} has no documented names"
        blocks = "\n\n".join(f"::: {name}.{key}" for key in sorted(public))
        content = f"# {name}\n\n{title}.\n\n{blocks}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for path in sorted({path for page in DOCS.rglob("*.md") for path in _linked_files(page)}):
        files.append(File.generated(config, _copy(path), content=(REPOSITORY / path).read_bytes()))
    for kind in SCHEMAS:
        files.append(File.generated(config, f"schemas/{kind}.json", content=_schema(kind)))
    lines = "\n".join(f"* [{kind}.json](../schemas/{kind}.json): {title}" for kind, title in SCHEMAS.items())
    files.append(File.generated(config, "reference/schemas.md", content=SCHEMA_PAGE.format(lines=lines)))
    return files


def _schema(kind: str) -> str:
    written = io.StringIO()
    with redirect_stdout(written):
        assert main(["config", "schema", kind]) == 0
    return written.getvalue()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside ``docs`` lead to their copies; of links to folders only the text is left."""
    copied = page.file.src_uri.startswith("source/")
    place = page.file.src_uri.removeprefix("source/") if copied else f"docs/{page.file.src_uri}"

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), match["path"]))
        if (REPOSITORY / path).is_dir():
            return match["text"]
        target = path.removeprefix("docs/") if path.startswith("docs/") else _copy(path)
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match['text']}]({relative}{match['anchor'] or ''})"

    return LINK.sub(replaced, markdown)


def _copy(path: str) -> str:
    """Where a file of the repository is in the site, which has no hidden folders."""
    return f"source/{path.removeprefix('.')}"


def _linked_files(page: Path) -> list[str]:
    """The files outside ``docs`` that a page leads to, and those that these lead to if they are pages."""
    found, pages = set(), [page]
    while pages:
        page = pages.pop()
        links = {(page.parent / match["path"]).resolve() for match in LINK.finditer(page.read_text(encoding="utf-8"))}
        new = {path for path in links if path.is_file() and DOCS not in path.parents} - found
        found |= new
        pages += [path for path in new if path.suffix == ".md"]
    return [path.relative_to(REPOSITORY).as_posix() for path in found]


def on_post_build(config: Any) -> None:
    """Every link and image of the built pages leads to a file; mkdocs does not check those of copied pages."""
    site = Path(config.site_dir)
    missing = []
    for page in site.rglob("*.html"):
        for path in re.findall(r'(?:href|src)="([^":#?]+)["#?]', page.read_text(encoding="utf-8")):
            target = (site / path[1:] if path.startswith("/") else page.parent / path).resolve()
            if not (target / "index.html" if target.is_dir() else target).is_file():
                missing.append(f"{page.relative_to(site)}: {path}")
    assert not missing, "\n".join(missing)


def _is_documented(member: Any) -> bool:
    """Whether an alias leads to a class or function of the package."""
    try:
        target = member.final_target
    except griffe.AliasResolutionError:
        return False
    return bool(target.is_class or target.is_function) and bool(target.docstring)
