"""The arguments of a training script."""

import pytest

from trainwright.config import default_argument_parser
from trainwright.config.arguments import split_config


def parse(*arguments, **kwargs):
    return default_argument_parser(**kwargs).parse_args(list(arguments))


def test_flags_may_stand_before_between_and_after_the_overrides():
    args = parse("--config-file", "c.py", "a.b=1", "--resume", "~c", "--eval-only", "x=[1,2]", "--fast-dev-run")
    assert (args.config_file, args.resume, args.eval_only, args.fast_dev_run) == ("c.py", True, True, True)
    assert args.opts == ["a.b=1", "~c", "x=[1,2]"]


def test_what_is_not_given_has_its_default():
    args = parse()
    assert (args.config_file, args.resume, args.eval_only, args.fast_dev_run, args.traceback) == ("", *[False] * 4)
    assert (args.opts, args.allow_module) == ([], [])
    assert parse("--allow-module", "a", "x=1", "--allow-module", "b.c").allow_module == ["a", "b.c"]


@pytest.mark.parametrize(("flag", "meant"), [("--train.seed=3", "train.seed=3"), ("--train.seed", "train.seed=...")])
def test_an_override_with_dashes_is_named_without(flag, meant, capsys):
    with pytest.raises(SystemExit):
        parse("--config-file", "c.py", flag)
    assert f"An override has no dashes: {meant}\n" in capsys.readouterr().err


def test_help_shows_overrides_or_the_epilog_that_is_given(capsys):
    for kwargs, text in (({}, "optim.lr=1e-3"), ({"epilog": "my own words"}, "my own words")):
        with pytest.raises(SystemExit) as caught:
            parse("--help", **kwargs)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("opts", "expected"),
    [
        (["a=1", "c.py", "~b"], ("c.py", ["a=1", "~b"])),
        (["c.py", "c.py"], ("c.py", ["c.py"])),  # the second one is refused as an override
        (["a=1", "~b"], ("", ["a=1", "~b"])),
        ([], ("", [])),
    ],
)
def test_one_configuration_stands_anywhere_among_the_overrides(opts, expected):
    assert split_config(opts) == expected


def test_a_path_with_an_equals_sign_is_a_configuration_if_it_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    for file in ("lr=0.1/config.py", "m_lr=1e-4.yaml"):
        assert split_config([file, "a.b=1"]) == ("", [file, "a.b=1"])  # an override, as far as is known
        (tmp_path / file).touch()
        assert split_config(["~x", file, "a.b=1"]) == (file, ["~x", "a.b=1"])
        assert split_config(["config.py", file]) == ("config.py", [file])
    # A folder, such as that of a run, only without another one: folders of sweeps are named by overrides.
    assert split_config(["lr=0.1"]) == ("lr=0.1", [])
    assert split_config(["lr=0.1", "config.py"]) == ("config.py", ["lr=0.1"])
