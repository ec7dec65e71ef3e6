"""Configurations: ``trainwright config show|diff|schema``. Reads them; builds nothing."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trainwright.config
from trainwright.base.errors import ConfigError, ConfigKeyError, MissingFileError, missing_path
from trainwright.config.arguments import CommandsParser, split_config
from trainwright.inspect.report.run_state import CONFIGS, config_file, flat
from trainwright.inspect.report.text import cell, print_found, shown, table

if TYPE_CHECKING:
    from omegaconf import DictConfig

_EPILOG = "exit code: 0 done, 1 `diff` found differences, 2 wrong file or argument"
_DEFAULT = "default"
_MAX_SHOWN = 100  # characters of a value


class Setting(NamedTuple):
    """A value and where it was set: ``default``, a file and perhaps its line, or an override."""

    value: Any
    source: str


def parser() -> CommandsParser:
    commands = CommandsParser(prog="trainwright config", epilog=_EPILOG)
    usage = "CONFIG|RUN [--changed] [--yaml|--json] [key=value ...]"
    show = commands.add_command("show", _show, usage, "every setting, and where it was set")
    show.add_argument("opts", nargs="*", metavar="CONFIG|RUN [key=value ...]", help="a configuration, overrides")
    show.add_argument("--changed", action="store_true", help="only the settings that are not defaults")
    show.add_argument("--yaml", action="store_true", help="print a complete YAML file")
    text = "the settings that differ; A and B are configs or runs"
    diff = commands.add_command("diff", _diff, "A B [--json]", text)
    diff.add_argument("first", metavar="A", help="a config file, or a run's folder")
    diff.add_argument("second", metavar="B", help="another one")
    usage, text = "[python|config] [--output FILE]", "JSON schema of YAML files, for editors"
    schema = commands.add_command("schema", _schema, usage, text)
    text = "of config files (default), or of the settings of the Python API"
    schema.add_argument("api", nargs="?", default="config", choices=["config", "python"], help=text)
    schema.add_argument("--output", metavar="FILE", type=Path, help="write it to a file")
    for one in (show, diff):
        one.add_common("json", "allow-module", "trust-folder", "traceback")
    return commands


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.run is _schema:
        return int(_schema(args))
    from trainwright.cli.train import print_error

    try:
        return int(args.run(args))
    except Exception as error:  # a configuration file is the user's program
        return print_error(error, args)


def _show(args: argparse.Namespace) -> int:
    config, args.opts = split_config(args.opts)
    if not config:
        raise ConfigError("config show: no configuration. For example: trainwright config show config.py optim.lr=1e-3")
    file = _file(config)
    if args.yaml and not _is_python_api(file):
        from trainwright.config.lazy.serialization import to_yaml

        print(to_yaml(_loaded(file, args), file).decode(), end="")
        return 0
    settings = _settings(file, args)
    if args.yaml:
        print(file.read_text(encoding="utf-8"), end="")
        return 0
    if args.changed:
        settings = {key: setting for key, setting in settings.items() if setting.source != _DEFAULT}
    facts = {key: setting._asdict() for key, setting in settings.items()}
    rows = [[shown(key), _text(setting.value), shown(setting.source)] for key, setting in settings.items()]
    print_found(facts, table([["setting", "value", "set by"], *rows]), as_json=args.json)
    return 0


def _diff(args: argparse.Namespace) -> int:
    args.opts = []
    settings = [_settings(_file(name), args) for name in (args.first, args.second)]
    both = [{key: setting.value for key, setting in one.items() if key != "project_root"} for one in settings]
    keys = dict.fromkeys(key for one in both for key in one)
    different = [key for key in keys if any(key not in one for one in both) or both[0][key] != both[1][key]]
    facts = {key: [one.get(key) for one in both] for key in different}
    rows = [[shown(key), *(_text(one[key]) if key in one else "-" for one in both)] for key in different]
    lines = table([["setting", shown(args.first), shown(args.second)], *rows]) if different else ["no differences"]
    print_found(facts, lines, as_json=args.json)
    return int(bool(different))


def _file(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_file():
        return path
    found = config_file(path)
    if found is None:
        text = "no config file, and no folder of a run."
        raise MissingFileError(f"{path}: {text}") if path.exists() else missing_path(path, text)
    return found


def _is_python_api(file: Path) -> bool:
    """Whether these are settings of a TrainingConfig rather than a LazyConfig."""
    if file.suffix == ".py":
        return False
    text = file.read_text(encoding="utf-8", errors="replace")
    return file.name == CONFIGS[1] or ("output_dir:" in text and "num_epochs:" in text and "_target_:" not in text)


def _settings(file: Path, args: argparse.Namespace) -> dict[str, Setting]:
    """All settings by their dotted keys. Secrets are ``???``."""
    if _is_python_api(file):
        if args.opts:
            raise ConfigKeyError(f"{args.opts[0]}: overrides are for config files; {file} is of the Python API.")
        from trainwright.config.settings import TrainingConfig

        config = TrainingConfig.load_from_yaml(file)
        return {k: Setting(v, str(file) if config.is_set(k) else _DEFAULT) for k, v in config.to_dict().items()}
    from trainwright.config.lazy.lazy_config import get_config
    from trainwright.config.lazy.serialization import to_plain
    from trainwright.config.secrets import without_secrets

    cfg = _loaded(file, args)
    defaults = dict(flat(to_plain(get_config("common/defaults.py"))[0]))
    values = dict(flat(without_secrets(to_plain(cfg)[0])[0]))
    return {key: Setting(value, _source(cfg, key, value, defaults, file)) for key, value in values.items()}


def _loaded(file: Path, args: argparse.Namespace) -> "DictConfig":
    from trainwright.cli.train import load
    from trainwright.config.config_file.sections import complete

    args.config_file, args.fast_dev_run = str(file), False
    return complete(load(args))


def _source(cfg: "DictConfig", key: str, value: Any, defaults: Mapping[str, Any], file: Path) -> str:
    from omegaconf import OmegaConf

    from trainwright.config.lazy.provenance import origin_of, override_at
    from trainwright.config.lazy.provenance import shown as relative

    if (override := override_at(cfg, key)) is not None:
        return f"override {override}"
    if key in defaults and defaults[key] == value:
        return _DEFAULT
    node = OmegaConf.select(cfg, key.rpartition(".")[0], throw_on_resolution_failure=False) if "." in key else cfg
    origin = origin_of(node)
    is_packaged = origin is None or Path(origin).is_relative_to(Path(trainwright.config.__file__).parent)
    return relative(str(file.absolute()) if is_packaged or origin is None else origin)


def _text(value: Any) -> str:
    return cell(value, _MAX_SHOWN) or '""'


def _schema(args: argparse.Namespace) -> int:
    from trainwright.config.json_schema import schema_of_config_files, schema_of_settings

    schema = schema_of_settings() if args.api == "python" else schema_of_config_files()
    text = json.dumps(schema, indent=1) + "\n"
    if args.output is None:
        print(text, end="")
        return 0
    from trainwright.base.files import atomic_write

    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {args.output.parent}.")
    atomic_write(args.output, text.encode())
    print(f"As the first line of a YAML file: # yaml-language-server: $schema={shown(args.output)}")
    return 0
