"""The room's names, and what importing them costs."""

import subprocess
import sys

import pytest

import trainwright.models as models


@pytest.mark.parametrize("name", models.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(models, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CRNN"):
        models.CRNN  # noqa: B018


def test_the_room_and_its_models_need_no_optional_package() -> None:
    code = (
        "import sys, trainwright.models as m\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n    m.build_model('gpt_text_generatoin')\nexcept ValueError as error:\n    print(error)\n"
        "[getattr(m, name) for name in m.__all__]\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "Did you mean 'gpt_text_generation'?" in done.stdout
    assert "torch" in loaded
    assert not {"timm", "transformers", "huggingface_hub", "PIL", "torchvision", "tokenizers"} & loaded
