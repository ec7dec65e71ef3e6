"""What data may call."""

import sys

import pytest
from omegaconf import OmegaConf

from tests.config.lazy.conftest import from_yaml
from trainwright.config import ConfigError, ConfigImportError, LazyConfig, instantiate
from trainwright.config.lazy.allowlist import allow_module, locate_untrusted, project_root, project_roots, use_project

ALLOWED = """
    torch.nn.Linear torch.optim.AdamW torch.optim.lr_scheduler.StepLR torch.utils.data.DataLoader
    torch.utils.data.TensorDataset torch.nn.functional.gelu torch.nn.init.xavier_uniform_
    torch.distributions.Normal torch.zeros torch.tensor torch.Generator torch.device torch.einsum
    torch.manual_seed torch.nn.functional.max_pool2d torch.nn.utils.rnn.pad_sequence
    torch.utils.data.default_collate torch.utils.data.random_split torch.linalg.norm
    trainwright.data.build_image_train_loader trainwright.data.CyclicSampler
    trainwright.data.sampler.CyclicSampler trainwright.data.Instance trainwright.data.collate
    trainwright.data.datasets.MNIST trainwright.data.transforms.ToTensor trainwright.evaluation.ClsEvaluator
    trainwright.optim.WarmupCosineLR trainwright.optim.get_default_optimizer_params
    trainwright.optim.configure_constant_scheduler trainwright.engine.GraphBase builtins.dict
    trainwright.hooks.EarlyStoppingCallback trainwright.hooks.DeterministicAlgorithms
"""
REFUSED = """
    os.system posix.system builtins.eval builtins.open subprocess.run subprocess.Popen sys.exit shutil.rmtree
    importlib.import_module pickle.loads runpy.run_path functools.partial operator.methodcaller yaml.unsafe_load
    numpy.load torch.load torch.save torch.from_file torch.hub.load torch.os.system
    torch.nn.modules.module.functools.partial torch.serialization.load torch.jit.load torch.compile
    torch.package.PackageImporter torch.utils.cpp_extension.load_inline torch.utils.cpp_extension.load
    torch.utils.benchmark.Timer torch.utils.data.datapipes.utils.decoder.basichandlers torch.utils.collect_env.run
    torch.utils.model_zoo.load_url torch.classes.load_library torch.ops.load_library
    torch.distributed.checkpoint.load torch.multiprocessing.spawn torch.nn torch.nn.Module.__subclasses__
    torch.nn.Module.__init__.__globals__.get trainwright.config.lazy.allowlist.allow_module
    trainwright.config.LazyConfig.load trainwright.config.LazyCall trainwright.checkpoint.Checkpointer
    trainwright.base.files.remove_folder trainwright.base.files.atomic_write
    trainwright.checkpoint.keep_newest trainwright.checkpoint.state_files._Decoder.decode
    trainwright.data.loaders._instantiated trainwright.data.to_batch trainwright.data.datasets.write_idx
    trainwright.data.Instance.stack trainwright.engine.folder.run_folder.RunFolder trainwright.events.EventStorage
    trainwright.events.JSONWriter trainwright.hooks.CallbackHook trainwright.hooks.ModelCheckpointCallback
    trainwright.optim.build_optimizer trainwright.DefaultTrainer trainwright.instantiate torch.nn.Module.apply
    torch.nn.Module.register_module
    torch.nn.Linear.load_state_dict torch.nn.parallel.data_parallel
    torch.nn.utils.parametrize.register_parametrization torch.nn.utils.skip_init
    torch.nn.utils.stateless.functional_call torch.nn.functional.boolean_dispatch torch.optim.swa_utils.update_bn
    torch.distributions.kl.register_kl torch.Tensor.register_hook torch.Tensor.apply_ torch.frombuffer
    torch.random.fork_rng torch._C._nn.gelu own_parts_xyz.Net.apply own_parts_xyz._hidden own_parts_xyz.Net._make
    trainwright.cli.main.main own_parts_xyz.os.system own_parts_xyz.subprocess.run own_parts_xyz.Counter
    stranger_xyz.anything
"""


@pytest.mark.parametrize("name", ALLOWED.split())
def test_the_building_blocks_are_allowed(name):
    assert callable(locate_untrusted(name))


@pytest.mark.parametrize("name", [*REFUSED.split(), "not a name", ""])
def test_everything_else_is_refused_without_importing_strangers(project, name):
    with pytest.raises((ConfigError, ConfigImportError), match=r"refused|dotted path"):
        locate_untrusted(name)
    assert "stranger_xyz" not in sys.modules


def build_all(node):
    """Build a node, and then the child that it may have left as a config, which is data still."""
    return instantiate(instantiate(node).width)


def test_a_refused_target_is_not_called_wherever_it_is_put(project):
    marker = project / "marker"
    call = f"{{_target_: os.mkdir, path: {marker}}}"
    cases = [
        f"x: {call}",
        f"x: {{_target_: own_parts_xyz.Net, width: {call}}}",
        f"x: [1, {call}]",
        f"x: {{a: {{b: {call}}}}}",
        f"y: {call}\nx: ${{y}}",
        f"name: os.mkdir\nx: {{_target_: '${{name}}', path: {marker}}}",
        f"x: {{_target_: {{_target_: own_parts_xyz.os.mkdir, _partial_: true}}, path: {marker}}}",
        f"x: {{_target_: own_parts_xyz.Net, _recursive_: false, width: {call}}}",
        # What builds nodes may be called by data, but not handed on.
        *(
            f"x: {{_target_: own_parts_xyz.Net, width: {{_target_: {name}, _partial_: true}}}}"
            for name in ("trainwright.data.build_image_train_loader", "builtins.dict")
        ),
    ]
    for text in cases:
        cfg = from_yaml(project, text)
        with pytest.raises(ConfigError, match="refused"):
            build_all(cfg.x)
        assert not marker.exists()


def test_targets_from_the_command_line_follow_the_same_rule(project):
    (project / "c.py").write_text(
        "from own_parts_xyz import Net\nfrom trainwright.config import LazyCall\n"
        "model = LazyCall(Net)(width=LazyCall(Net)(width=LazyCall('os.getcwd')()))\nother = dict(name='x')\n"
        "link = LazyCall('${other.name}')()\n"
    )
    for override in (
        "model._target_=os.getcwd",
        "model={_target_:os.getcwd}",
        "+model.more={_target_:os.getcwd}",
        "+model.more=[{_target_:os.getcwd}]",
        "model.width._target_=os.getcwd",
        "model._target_=${other.name}",
    ):
        cfg = LazyConfig.load(project / "c.py")
        LazyConfig.apply_overrides(cfg, [override, "other.name=os.getcwd"])
        with pytest.raises(ConfigError, match="refused"):
            instantiate(cfg.model)
    with pytest.raises(ConfigError, match="refused"):
        instantiate(LazyConfig.apply_overrides(LazyConfig.load(project / "c.py"), ["other.name=os.getcwd"]).link)

    cfg = LazyConfig.apply_overrides(LazyConfig.load(project / "c.py"), ["model._target_=own_parts_xyz.Net"])
    assert str(instantiate(cfg.model).width.width) == str(project)  # what code named in the same tree is still code's


def test_allow_module_adds_a_module_but_never_one_that_runs_anything():
    with pytest.raises(ConfigError, match="--allow-module"):
        locate_untrusted("collections.Counter")
    allow_module("collections")
    assert locate_untrusted("collections.Counter")
    for name in ("os", "builtins", "subprocess", "os.path", "importlib.util"):
        with pytest.raises(ConfigError, match="cannot be allowed"):
            allow_module(name)
    with pytest.raises(ConfigError, match="not the name"):
        allow_module("a b")


def test_the_project_root_is_the_folder_or_the_parent_of_configs(project):
    assert project_root("configs/x.py") == project
    assert project_root("x.py") == project
    assert project_roots(project.parent / "elsewhere/x.py") == [project.parent / "elsewhere", project]


@pytest.mark.parametrize("named", ["..", "../configs", "../../elsewhere", "."])
def test_the_project_root_that_a_yaml_file_names_is_only_a_suggestion(project, named):
    (project / "out").mkdir()
    for content in ({"project_root": named}, OmegaConf.create({"project_root": named})):
        assert project_roots("out/config.yaml", content) == [project]
    trusted = project_roots("out/config.yaml", {"project_root": named}, trusts_folder=True)
    assert trusted[0] == (project / "out" / named).resolve()


@pytest.mark.parametrize("place", ["", "run", "run/deep"])
def test_the_working_folder_is_data_if_it_is_beside_or_inside_of_the_given_file(project, monkeypatch, place):
    (project / "run/deep").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    (project / "config.yaml").write_text("model: {_target_: own_parts_xyz.Net}\n")
    (project / place / "other_parts_xyz.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(project / place)
    assert use_project(project / "config.yaml") == []
    assert str(project / place) not in sys.path
    for target in ("other_parts_xyz.Net", "own_parts_xyz.Net"):
        with pytest.raises(ConfigError, match="--trust-folder"):
            locate_untrusted(target, config_file=project / "config.yaml")


@pytest.mark.parametrize("file", ["dl/config.yaml", "dl/run/config.yaml", "dl/deep/er/run/config.yaml", "link.yaml"])
@pytest.mark.parametrize("root", ["../code", "..", None])
def test_code_anywhere_in_an_unpacked_archive_is_data(project, monkeypatch, file, root):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (project / "dl/code").mkdir(parents=True)
    (project / "dl/config.yaml").touch()
    (project / "link.yaml").symlink_to("dl/config.yaml")
    for folder in (project / "dl/code", project / "dl"):
        (folder / "their_parts_xyz.py").write_text("raise SystemExit('imported')\n")
    assert project in use_project(file, {"project_root": root}) or file == "link.yaml"
    for target in ("dl.code.their_parts_xyz.Net", "dl.their_parts_xyz.Net", "their_parts_xyz.Net"):
        with pytest.raises(ConfigError, match="--trust-folder"):
            locate_untrusted(target, config_file=project / file)
    if file != "link.yaml":  # which is beside the modules of the project, too
        assert locate_untrusted("own_parts_xyz.Net").__name__ == "Net"


def test_a_target_without_its_module_is_answered_with_the_form(project):
    (project / "config.yaml").touch()
    for file in (None, project / "config.yaml"):
        with pytest.raises(ConfigError, match=r"got 'Net', without its module\. Write it before the name"):
            locate_untrusted("Net", config_file=file)


def test_a_refusal_shows_the_project_root_that_the_file_names(project, folders):
    file = folders["run"] / "config.yaml"
    use_project(file, {"project_root": str(folders["other"])})
    with pytest.raises(ConfigError, match=f"the file says: {folders['other']}"):
        locate_untrusted("other_parts_xyz.Far", config_file=file)


@pytest.fixture
def folders(project, monkeypatch):
    """Folders with a module each: of a run in the working folder, of one elsewhere, and of another project."""
    found = {"run": project / "out" / "run", "far": project.parent / "far_run", "other": project.parent / "other"}
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    for name, folder in found.items():
        folder.mkdir(parents=True)
        (folder / f"{name}_parts_xyz.py").write_text("class Far: pass\n")
        (folder / "config.yaml").write_text(f"model: {{_target_: {name}_parts_xyz.Far}}\n")
        (folder / "config.py").write_text("model = dict(a=1)\n")
    for name in ("run", "far"):
        (found[name] / "run.json").write_text("[]")
    yield found
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["run", "far", "other"])
def test_the_folder_of_a_run_and_one_elsewhere_are_data_unless_they_are_trusted(project, folders, name):
    file, module = folders[name] / "config.yaml", f"{name}_parts_xyz"
    cfg = LazyConfig.load(file)
    for content in ({}, {"project_root": "."}, {"project_root": str(folders[name])}):
        assert use_project(file, content) == [project]
        with pytest.raises(ConfigError, match="--trust-folder"):
            instantiate(cfg.model)
    if name == "run":
        for target in ("out.run.run_parts_xyz.Far", "out.run.run_parts_xyz"):  # through folders without __init__.py
            with pytest.raises(ConfigError, match="refused"):
                locate_untrusted(target)
        assert "out.run.run_parts_xyz" not in sys.modules
    assert module not in sys.modules
    assert use_project(file, cfg, trusts_folder=True) == [folders[name], project]
    assert type(instantiate(cfg.model)).__module__ == module


def test_the_folder_of_a_python_file_is_code_and_comes_behind_installed_packages(project, folders):
    assert use_project(folders["other"] / "config.py") == [folders["other"], project]
    assert use_project(folders["other"] / "config.py") == [folders["other"], project]
    assert sys.path.count(str(folders["other"])) == 1
    assert sys.path.index(str(folders["other"])) > max(n for n, path in enumerate(sys.path) if "-packages" in path)
    assert locate_untrusted("other_parts_xyz.Far").__name__ == "Far"
