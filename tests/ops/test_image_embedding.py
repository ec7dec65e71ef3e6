"""Operators that turn images into vectors; timm is the reference."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import trainwright


def test_an_embedding_is_what_the_classifier_looks_at(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    op = trainwright.ops.image_embedding.timm(model_name="resnet18", num_classes=10).get_op()
    image = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    embedding = op(image)
    assert embedding.shape == (512,)
    assert op.model.training
    reference = timm.create_model("resnet18", num_classes=0)
    reference.load_state_dict(op.model.state_dict(), strict=False)
    pixels = op.transform(Image.fromarray(image)).unsqueeze(0)
    with torch.no_grad():
        np.testing.assert_allclose(embedding, reference.eval()(pixels)[0].numpy(), rtol=1e-5, atol=1e-6)
    for same in (tmp_path / "image.png", Image.fromarray(image), pixels[0]):
        np.testing.assert_array_equal(op(same), embedding)
