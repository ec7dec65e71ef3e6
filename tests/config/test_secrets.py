"""Nothing that looks secret gets into a file or a log line of a run; what only looks a little like it stays."""

import copy
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch.utils.data import TensorDataset

from trainwright import Trainer
from trainwright.cli.main import main
from trainwright.config import ConfigError, ConfigKeyError, LazyCall, LazyConfig
from trainwright.config.config_file.checks import validate
from trainwright.config.config_file.sections import complete
from trainwright.config.secrets import (
    MISSING,
    REDACTED,
    RedactingFormatter,
    redact,
    redact_command,
    safe_trackers,
    without_secrets,
)
from trainwright.config.settings import TrainingConfig
from trainwright.engine.folder.run_folder import RunFolder

FORMS = {
    "hugging face": "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZabcdefgh",
    "openai": "sk-" + "proj-Ab1_Cd2-Ef3Gh4Ij5Kl6Mn7",
    "github": "ghp_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8",
    "github, fine-grained": "github_pat_" + "11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ",
    "gitlab": "glpat-" + "Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "amazon": "AKIA" + "IOSFODNN7EXAMPLE",
    "google": "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
    "slack": "xoxb-" + "1234567890-abcdefghij",
    "web token": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA1\nabcd\n-----END RSA PRIVATE KEY-----",
    "a url": "postgres://me:pa55word@db.example.org:5432/runs",
    "a header": "Bearer " + "abcdefghijklmnopqrstuvwxyz012345",
}
SECRET_NAMES = """
    password passwd db_password dbPassword passphrase secret client_secret secret_key secrets api_key apikey apiKey
    API_KEY x-api-key access_key access_key_id accessKeyId private_key sshPrivateKey credential credentials auth_token
    hub_token hf_token token HF_TOKEN aws_secret_access_key wandb_api_key github_token access_tokens api_keys PGPASSWORD
"""
PLAIN_NAMES = """
    pad_token bos_token eos_token unk_token mask_token image_token token_ids token_type_ids max_tokens num_tokens tokens
    tokenizer tokenization consumed_tokens additional_special_tokens next_token_loss key keys monkey keyword primary_key
    key_padding_mask query_key_value public_key cache_key password_file secret_name credentials_path PWD OLDPWD compass
    secretary passes TOKENIZERS_PARALLELISM
"""


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.config.secrets._of_configs", set())


def saved(cfg: object, folder: Path) -> str:
    LazyConfig.save(OmegaConf.create(cfg, flags={"allow_objects": True}), folder / "config.yaml")
    return (folder / "config.yaml").read_text()


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_a_secret_is_known_by_its_key(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = saved({"part": {name: "plain words"}}, tmp_path)
    assert "plain words" not in text
    assert yaml.safe_load(text) == {"part": {name: MISSING}}
    assert f"part.{name}" in caplog.text


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_a_key_of_another_meaning_is_left_alone(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert yaml.safe_load(saved({"part": {name: "plain words"}}, tmp_path)) == {"part": {name: "plain words"}}
    assert not caplog.records


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_known_by_its_form(form: str, tmp_path: Path) -> None:
    for value in (FORMS[form], f"before {FORMS[form]} after"):
        text = saved({"part": {"anything": value, "listed": ["a", value], "other": "stays"}}, tmp_path)
        assert yaml.safe_load(text) == {"part": {"anything": MISSING, "listed": ["a", MISSING], "other": "stays"}}


@pytest.mark.parametrize(
    "value",
    [
        *(
            "hf_model_for_classification",
            "sk-learn-pipelines-of-classes",
            "risk-averse-optimization-2024",
            "AKIA",
            "eyJ",
        ),
        *("ghp_", "https://example.org/a:b@c", "s3://bucket/path", "http://localhost:8080/x", "ssh://git@host/repo"),
        *("torch.nn.Linear", "a=b", "key=value", "token_ids=5", "xoxo-love"),
    ],
)
def test_text_of_another_meaning_is_left_alone(value: str, tmp_path: Path) -> None:
    assert yaml.safe_load(saved({"part": {"anything": value}}, tmp_path)) == {"part": {"anything": value}}
    assert redact(value) == value


@pytest.mark.parametrize("value", [None, True, False, "", "${part.other}", "???", "<|user|>", "[MASK]", 7])
def test_a_value_that_is_no_secret_stays_under_the_name_of_one(value: object, tmp_path: Path) -> None:
    written = yaml.safe_load(saved({"part": {"other": 1, "token": value}}, tmp_path))
    assert written == {"part": {"other": 1, "token": value}}


def test_secrets_in_lists_tuples_and_dicts_of_them_are_found(tmp_path: Path) -> None:
    cfg = {
        "credentials": {"user": "me", "more": [{"deep": "plain words"}]},
        "password": 123456,
        "hub_token": {"_target_": "os.getenv", "key": "HUB"},  # how to get it, which is no secret
        "tokens": ["plain words", ["more words", {"deep": "last words"}]],
        "api_keys": ("plain words", {"a": ["more words"]}),
        "hub": {"tokens": {"mine": "plain words"}},
        "model": LazyCall(dict)(tokens=["plain words"], special_tokens=["<s>", "a mark"], stop_tokens=[2, 3]),
        "ids": {"tokens": [1, 2, None], "rename": {"tokens": "input_ids"}},
    }
    assert yaml.safe_load(saved(cfg, tmp_path)) == {
        "credentials": {"user": MISSING, "more": [{"deep": MISSING}]},
        "password": MISSING,
        "hub_token": {"_target_": "os.getenv", "key": "HUB"},
        "tokens": [MISSING, [MISSING, {"deep": MISSING}]],
        "api_keys": [MISSING, {"a": [MISSING]}],
        "hub": {"tokens": {"mine": MISSING}},
        "model": {
            "_target_": "builtins.dict",
            "tokens": [MISSING],
            "special_tokens": ["<s>", "a mark"],
            "stop_tokens": [2, 3],
        },
        "ids": {"tokens": [1, 2, None], "rename": {"tokens": "input_ids"}},
    }


def test_a_file_with_a_secret_in_it_is_a_path_like_others(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("-----BEGIN PRIVATE KEY-----")
    written = yaml.safe_load(saved({"part": {"private_key": str(tmp_path / "id_rsa")}}, tmp_path))
    assert written == {"part": {"private_key": str(tmp_path / "id_rsa")}}


def test_an_object_that_is_written_as_text_is_written_without_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Client:
        def __repr__(self) -> str:
            return f"Client(api_key='plain', {'x' * 170}{FORMS['github']})"

    text = saved({"client": Client()}, tmp_path)
    for part in ("plain", FORMS["github"][:12]):
        assert part not in text
        assert part not in caplog.text


def test_variables_of_the_environment_with_a_secret_name_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPM_TOKEN", "plainwordsonly")
    monkeypatch.setenv("SHORT_TOKEN", "train")
    monkeypatch.setenv("OTHER_VARIABLE", "otherwordsonly")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    cfg = {"a": "x-plainwordsonly-x", "b": "train", "c": "otherwordsonly", "d": str(tmp_path / "output")}
    assert yaml.safe_load(saved(cfg, tmp_path)) == {**cfg, "a": MISSING}
    assert redact("with plainwordsonly in train") == f"with {REDACTED} in train"


def test_one_warning_names_the_keys_and_the_fix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = {"hub": {"token": "plain words", "url": FORMS["a url"]}, "list": [{"password": "plain words"}]}
    saved(cfg, tmp_path)
    saved(cfg, tmp_path)  # a run writes it twice
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelno == logging.WARNING
    for fact in ("hub.token, hub.url, list.0.password", "key=value", "environment variable", str(tmp_path)):
        assert fact in said
    assert "plain words" not in said
    assert "pa55word" not in said


def test_the_configuration_in_memory_is_as_it_was(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"hub": {"token": "plain words", "keys": [FORMS["github"]]}})
    before = copy.deepcopy(cfg)
    LazyConfig.save(cfg, tmp_path / "config.yaml")
    assert cfg == before
    tree = {"hub": {"token": "plain words"}}
    without_secrets(tree)
    assert tree == {"hub": {"token": "plain words"}}


def test_a_saved_configuration_asks_for_what_was_left_out() -> None:
    linear = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    cfg = {
        "model": {**linear, "bias": MISSING},
        "dataloader": {"train": dict(linear)},
        "hub": {"token": MISSING, "later": MISSING},
        "api_key": MISSING,
    }
    with pytest.raises(ConfigKeyError) as raised:
        validate(complete(OmegaConf.create(cfg)))
    lines = str(raised.value).splitlines()
    assert "3 faults" in lines[0]
    for key in ("model.bias", "hub.token", "api_key"):
        (line,) = [line for line in lines if line.strip().startswith(f"{key}:")]
        assert "has no value yet" in line
        assert f"{key}=... on the command line" in line


# Python API


def test_a_training_config_is_saved_without_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainingConfig(init_weights_from="https://me:pa55word@example.org/w.safetensors", num_epochs=3)
    path = tmp_path / "training_config.yaml"
    config.save_to_yaml(path)
    assert "pa55word" not in path.read_text()
    assert "init_weights_from" in caplog.text
    assert "pa55word" in str(config.init_weights_from)
    with pytest.raises(ConfigError, match=r"training_config\.yaml: init_weights_from: no value yet") as raised:
        TrainingConfig.load_from_yaml(path)
    assert "Write the value into the file" in str(raised.value)
    path.write_text(path.read_text().replace(MISSING, "elsewhere"))
    assert TrainingConfig.load_from_yaml(path).init_weights_from == "elsewhere"


# log lines

LONG = {
    "a word": "key " + "a" * 20_000,
    "a path of keys": "token " + "a." * 10_000,
    "a name": "key " + "a_" * 10_000 + "=b",
    "quotes": "key " + "k='" * 7_000,
    "both quotes": "key " + "k=\"k='" * 3_500,
    "blanks": "key" + " " * 20_000 + "=",
    "prefixes": "sk-" * 7_000,
    "parts of web tokens": "eyJ-" * 5_000,
    "parts of web tokens with points": "eyJaaaaaaaa." * 1_700,
    "beginnings of keys": "-----BEGIN " * 1_800,
    "an end of a key that is none": "-----BEGIN PRIVATE KEY-----" + "-----END " * 2_000,
    "a url": "://" + "a:" * 10_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_text_takes_time_in_proportion_to_its_length(text: str) -> None:
    start = time.process_time()
    redact(text)
    redact_command(["--token", text])
    without_secrets({"text": text})
    assert time.process_time() - start < 1  # seconds of the CPU; about 0.01, and 10 to 100 if it were the square


@pytest.fixture
def logger() -> tuple[logging.Logger, list[str], list[logging.LogRecord]]:
    """A logger with our formatter on one handler and a stranger's handler beside it."""
    lines: list[str] = []
    records: list[logging.LogRecord] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    ours, theirs = Lines(), Records()
    ours.setFormatter(RedactingFormatter("%(message)s"))
    found = logging.Logger("a test's own")
    found.handlers = [ours, theirs]
    return found, lines, records


@pytest.mark.parametrize("form", FORMS)
def test_a_log_line_is_written_without_secrets(form: str, logger) -> None:
    log, lines, records = logger
    value = FORMS[form]
    log.warning("before %s after", value)
    log.warning("before %(a)s after", {"a": value})
    log.warning(f"before {value} after")
    try:
        raise ValueError(f"before {value} after")
    except ValueError:
        log.exception("it failed")
    for line in lines:
        assert REDACTED in line
        assert value not in line
        assert "before" in line
        assert "after" in line
    assert "pa55word" not in str(lines)
    assert records[0].getMessage() == f"before {value} after"  # who has a handler gets the record as it is
    assert records[0].args == (value,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password=hunter2", "password=[redacted]"),
        ("Client(api_key='a b', other='c')", "Client(api_key='[redacted]', other='c')"),
        ('{"hub": {"auth_token": "abc"}}', '{"hub": {"auth_token": "[redacted]"}}'),
        ("override 'hub.token=abc'", "override 'hub.token=[redacted]'"),
        ("optim.token: no such key. Did you mean 'tokens'?", None),
        ("part.password: has no value yet (it is '???').", None),
        ("tokens: 5  token=5  key: 'x'  password=None  token='<pad>'", None),
        ("eta: 0:00:12  iteration: 5/100  total_loss: 0.5  lr: 1.00e-03  tokens/s: 500", None),
        ("https://me:x@example.org/path", "https://[redacted]@example.org/path"),
        ("${oc.env:HF_TOKEN}", None),
    ],
)
def test_values_of_secret_names_in_a_line_are_redacted_and_others_are_not(text: str, expected: str | None) -> None:
    assert redact(text) == (text if expected is None else expected)


def test_a_run_keeps_them_out_of_its_lines_before_it_writes_anything(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("")  # an earlier run, which is left alone until the first step
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(OmegaConf.create({"hub": {"password": "hunter2", "token": "cat"}}))
    folder.close()
    assert not (tmp_path / "config.yaml").exists()
    assert redact("logged in with hunter2, hunter22 and a cat") == f"logged in with {REDACTED}, hunter22 and a cat"


def test_no_part_of_a_secret_remains_where_one_is_a_part_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-ijklmnop")
    assert redact("x abcdefgh-ijklmnop y") == f"x {REDACTED} y"


# whole runs

PLANTED = {
    "in the config, by name": "correct horse battery",
    "in the config, by form": FORMS["hugging face"],
    "in the config, in a url": "pa55word",
    "in an argument of the model": "swordfish77",
    "in the environment": "environmental-secret",
    "on the command line": "typed-in-secret",
}


@pytest.fixture(scope="module")
def project(mnist_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with secrets in its configuration, and a model that logs all that it knows."""
    copied = tmp_path_factory.mktemp("secrets") / "mnist"
    shutil.copytree(mnist_project, copied, symlinks=True)
    config = copied / "configs" / "config.py"
    config.write_text(
        config.read_text().replace(
            "num_classes=10", f"num_classes=10, token={PLANTED['in an argument of the model']!r}"
        )
        + f"hub = dict(password={PLANTED['in the config, by name']!r}, x={PLANTED['in the config, by form']!r},"
        f" url='https://me:{PLANTED['in the config, in a url']}@example.org/x', typed=dict(api_key='none'))\n"
    )
    model = copied / "modeling" / "model.py"
    text = model.read_text()
    assert "def __init__(self, num_classes" in text
    text = text.replace("def __init__(self, num_classes", "def __init__(self, token, num_classes")
    logs = (
        "        import logging, os\n"
        "        for name in ('trainwright.user', 'libai.user'):\n"
        "            log = logging.getLogger(name)\n"
        "            for value in (token, *os.environ['PLANTED'].split('|')):\n"
        "                log.warning('canary: %s', value)\n"
        "                log.warning(f'canary: {value}', extra={'file_only': True})\n"
        "                try:\n"
        "                    raise ValueError(value)\n"
        "                except ValueError:\n"
        "                    log.exception('canary')\n"
        "        super().__init__()\n"
    )
    assert "        super().__init__()\n" in text
    model.write_text(text.replace("        super().__init__()\n", logs, 1))
    return copied


def assert_without_secrets(folder: Path, *printed: str) -> None:
    seen = 0
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            seen += 1
            for where, value in PLANTED.items():
                assert value.encode() not in content, f"{path}: the one {where}"
    assert seen > 10
    for text in printed:
        for where, value in PLANTED.items():
            assert value not in text, where


def test_no_file_and_no_line_of_a_run_has_a_secret(
    project: Path, train: Callable, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"https://me:{PLANTED['in the config, in a url']}@example.org/x"
    others = [value for where, value in PLANTED.items() if where != "in the config, in a url"]
    monkeypatch.setitem(environment, "MY_SERVICE_PASSWORD", PLANTED["in the environment"])
    monkeypatch.setitem(environment, "PLANTED", "|".join([*others, url]))
    folder = tmp_path / "output"
    quick = ("train.train_epoch=0", "train.train_iter=4", "train.checkpointer.period=2", "train.eval_period=2")
    typed = f"hub.typed.api_key={PLANTED['on the command line']}"
    done = train(project / "configs" / "config.py", *quick, typed, f"train.output_dir={folder}", cwd=project)

    assert_without_secrets(folder, done.stdout, done.stderr)
    log = (folder / "log.txt").read_text()
    assert log.count("canary: [redacted]") == 2 * 2 * (len(PLANTED) + 1) - 4  # the url keeps its host
    assert "[redacted]@example.org" in log
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["hub"] == {"password": MISSING, "x": MISSING, "url": MISSING, "typed": {"api_key": MISSING}}
    assert written["model"]["token"] == MISSING
    (warning,) = [line for line in done.stdout.splitlines() if "looks secret" in line]
    for key in ("model.token", "hub.password", "hub.x", "hub.url", "hub.typed.api_key"):
        assert key in warning

    again = (folder / "config.yaml", f"train.output_dir={tmp_path / 'again'}", *quick)
    done = train(*again, cwd=project, code=2)
    for key in ("model.token", "hub.password", "hub.typed.api_key"):
        assert re.search(rf"{key}( \(in \S*config\.yaml\))?: has no value yet", done.stderr), done.stderr
    assert not (tmp_path / "again").exists()

    given = [f"{key}=given-again" for key in ("model.token", "hub.password", "hub.x", "hub.url", "hub.typed.api_key")]
    train(*again, *given, cwd=project)
    assert (tmp_path / "again" / "model_final").exists()


def test_no_file_of_a_run_of_the_python_api_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", PLANTED["in the environment"])

    class Talkative(Trainer):
        def training_step(self, batch: object) -> object:
            for value in (PLANTED["in the environment"], PLANTED["in the config, by form"]):
                logging.getLogger("trainwright.user").warning("canary: %s", value)
            return super().training_step(batch)

    data = TensorDataset(torch.randn(8, 2), torch.randint(2, (8,)))
    config = TrainingConfig(output_dir=tmp_path, batch_size=4, num_epochs=2, device="cpu", progress_bar=False)
    Talkative(torch.nn.Linear(2, 2), config, data, data).train()
    assert_without_secrets(tmp_path, capsys.readouterr().out)
    assert (tmp_path / "log.txt").read_text().count("canary: [redacted]") == 8


def test_an_error_on_the_command_line_is_printed_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.py").write_text("model = dict(_target_='torch.nn.Linear', in_features=1, out_features=1)\n")
    secret = PLANTED["on the command line"]
    for extra in ([], ["--traceback"]):
        assert main(["train", str(tmp_path / "config.py"), f"train.api_key={secret}", *extra]) == 2
        said = capsys.readouterr().err
        assert "train.api_key" in said
        assert secret not in said


def test_a_tracker_gets_no_command_line_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs", "3"])
    assert safe_trackers({"wandb": {"project": "p"}}) == {"wandb": {"project": "p"}}
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "a1b2c3d4"])
    assert safe_trackers({"wandb": {"project": "p"}}) == {
        "wandb": {"project": "p", "settings": {"x_disable_meta": True}}
    }
    assert safe_trackers({"mlflow": {}}) == {"mlflow": {}}
    assert safe_trackers(None) is None


def test_the_text_of_an_error_is_cut_and_a_secret_in_it_is_hidden(logger) -> None:
    log, lines, _ = logger
    try:
        try:
            raise ValueError("first" + "x" * 100_000)
        except ValueError as cause:
            raise RuntimeError("second" + "y" * 100_000 + " " + FORMS["github"]) from cause
    except RuntimeError as error:
        log.error("failed: %s", error, exc_info=error)
        log.error("failed: %s", error)
    for line in lines:
        assert "second" in line
        assert "characters are left out" in line
        assert FORMS["github"] not in line
        assert len(line) < 60_000
    assert "first" in lines[0]
    assert "ValueError" in lines[0]
