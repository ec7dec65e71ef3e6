"""The defaults that come with the library."""

from pathlib import Path

import pytest

from trainwright.config import ConfigTypeError, MissingFileError, get_config, instantiate


def test_each_call_gives_a_fresh_copy():
    get_config("common/train.py").train.seed = 5
    assert get_config("common/train.py").train.seed == 1234


def test_the_sections_are_to_be_had_alone_and_together():
    together = get_config("common/defaults.py")
    assert sorted(together) == ["graph", "optim", "train"]
    for name in together:
        assert together[name] == get_config(f"common/{name}.py")[name]


def test_the_documented_values():
    train, optim = (get_config(f"common/{name}.py")[name] for name in ("train", "optim"))
    assert (train.output_dir, train.train_micro_batch_size, train.train_iter, train.seed) == (
        "./output",
        32,
        10000,
        1234,
    )
    assert train.checkpointer == {
        "period": 5000,
        "max_to_keep": 100,
        "save_model_after_n_epoch": None,
        "asynchronous": True,
    }
    assert (train.evaluation.eval_metric, train.evaluation.eval_mode, train.evaluation.eval_iter) == (
        "Acc@1",
        "max",
        1e9,
    )
    assert train.scheduler == {
        "_target_": "trainwright.optim.WarmupCosineLR",
        "warmup_factor": 0.001,
        "alpha": 0.01,
        "warmup_method": "linear",
    }
    assert train.dist.device_type is None
    assert train.input_placement_device is None
    assert (optim._target_, optim.lr, optim.weight_decay, optim.betas) == (
        "torch.optim.AdamW",
        1e-4,
        0.01,
        [0.9, 0.999],
    )
    assert "do_bias_correction" not in optim


@pytest.mark.parametrize("name", ["common/trian.py", "../lazy.py", "common/", "", "/etc/passwd"])
def test_another_name_lists_what_there_is(name):
    for kind in (MissingFileError, RuntimeError):
        with pytest.raises(kind, match=r"not available in .*common/train\.py"):
            get_config(name)


def test_the_nearest_name_is_given():
    with pytest.raises(MissingFileError, match=r"Did you mean 'common/train\.py'"):
        get_config("common/trian.py")


def test_the_default_evaluator_is_built_from_its_dotted_path():
    evaluation = pytest.importorskip("trainwright.evaluation")
    assert isinstance(instantiate(get_config("common/train.py").train.evaluation.evaluator), evaluation.ClsEvaluator)
    with pytest.raises(ConfigTypeError, match="optimizer"):
        instantiate(get_config("common/train.py").train.scheduler)  # the optimizer comes later


def test_a_path_is_a_file_of_ones_own_read_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("train = dict(seed=7)\n")
    get_config("train.py").train.seed = 8
    assert get_config("train.py").train.seed == 7
    assert get_config(str(tmp_path / "train.py")).train.seed == 7
