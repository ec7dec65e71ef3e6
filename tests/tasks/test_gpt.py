"""A decoder that goes on with texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toys import assert_equal_weights
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig, Model
from trainwright.tasks.tokenizer import TextTokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,  # so that an untrained model does not say one thing for ever
}


@pytest.fixture
def model() -> GPTTextGeneration:
    torch.manual_seed(0)
    return GPTTextGeneration(GPTTextGenerationConfig(**SMALL)).eval()


def continue_by_hand(model: GPTTextGeneration, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]))["logits"][0, -1].argmax()))
            if text[-1] == eos:
                break
    return text[len(prompt) :]


PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]


def padded(prompts: list[list[int]], side: str = "right") -> tuple[Tensor, Tensor]:
    length = max(map(len, prompts))
    fill = [[0] * (length - len(p)) for p in prompts]
    rows = [p + f if side == "right" else f + p for p, f in zip(prompts, fill, strict=True)]
    ones = [[1] * len(p) for p in prompts]
    mask = [o + f if side == "right" else f + o for o, f in zip(ones, fill, strict=True)]
    return torch.tensor(rows), torch.tensor(mask)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_likeliest_tokens_are_those_of_a_loop_by_hand(model: GPTTextGeneration, side: str) -> None:
    token_ids, mask = padded(PROMPTS, side)
    expected = [continue_by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3
    assert model.generate(token_ids, mask, max_new_tokens=6).tolist() == expected


def test_an_answer_ends_with_the_end_token(model: GPTTextGeneration) -> None:
    token_ids, mask = padded(PROMPTS)
    free = [continue_by_hand(model, prompt, 8) for prompt in PROMPTS]
    eos = free[0][2]
    model.config.eos_token_id = eos
    expected = [continue_by_hand(model, prompt, 8, eos) for prompt in PROMPTS]
    longest = max(map(len, expected))
    assert model.generate(token_ids, mask, max_new_tokens=8).tolist() == [
        row + [0] * (longest - len(row)) for row in expected
    ]
    assert model.generate(token_ids[:1, :3], max_new_tokens=8).shape == (1, 1 + free[0].index(eos))


def test_the_prompt_of_a_batch_in_trainings_form_ends_before_its_labels(model: GPTTextGeneration) -> None:
    token_ids = torch.tensor([[3, 4, 5, 9, 9, 9], [6, 2, 2, 0, 0, 0]])
    labels = torch.tensor([[-100, -100, -100, 9, 9, 9], [-100, 2, 2, -100, -100, -100]])
    mask = (token_ids != 0).long()
    made = model.generate(token_ids, mask, labels=labels, max_new_tokens=4)
    assert made.tolist() == [continue_by_hand(model, prompt, 4) for prompt in ([3, 4, 5], [6])]
    without_mask = model.generate(token_ids, labels=labels, max_new_tokens=4)
    assert torch.equal(without_mask, made)
    # Of a text that is all labels, the first token is the prompt.
    whole = model.generate(token_ids[:1], labels=token_ids[:1], max_new_tokens=4)
    assert whole.tolist() == [continue_by_hand(model, [3], 4)]


def test_draws_follow_the_scores_the_temperature_and_the_generator(model: GPTTextGeneration) -> None:
    prompt = torch.tensor([[3, 4, 5]]).repeat(4000, 1)
    with torch.no_grad():
        scores = model(prompt[:1])["logits"][0, -1]
    for temperature, top_k in ((1.0, None), (2.0, 3)):
        kept = scores if top_k is None else scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
        generator = torch.Generator().manual_seed(0)
        how = {"max_new_tokens": 1, "temperature": temperature, "top_k": top_k}
        drawn = model.generate(prompt, **how, generator=generator)[:, 0]
        shares = torch.bincount(drawn, minlength=12) / len(drawn)
        # Tolerance: four standard deviations of a share of 4000 draws, sqrt(0.25 / 4000).
        torch.testing.assert_close(shares, (kept / temperature).softmax(-1), rtol=0, atol=0.032)
        again = model.generate(prompt, **how, generator=torch.Generator().manual_seed(0))[:, 0]
        assert torch.equal(drawn, again)


def test_a_token_does_not_see_those_after_it_nor_padding(model: GPTTextGeneration) -> None:
    text = torch.tensor([[3, 4, 5, 6]])
    logits = model(text)["logits"]
    changed = model(torch.tensor([[3, 4, 5, 9]]))["logits"]
    torch.testing.assert_close(changed[:, :3], logits[:, :3])
    left = model(torch.tensor([[0, 0, 3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1, 1, 1]]))["logits"]
    torch.testing.assert_close(left[:, 2:], logits, rtol=0, atol=1e-5)
    assert left.isfinite().all()


def test_the_loss_is_that_of_the_next_token(model: GPTTextGeneration) -> None:
    text = torch.tensor([[3, 4, 5, 6, 0]])
    labels = torch.tensor([[-100, -100, 5, 6, -100]])
    logits = model(text)["logits"]
    scores = logits[0].log_softmax(-1)
    torch.testing.assert_close(model.compute_loss(logits, labels), -(scores[1, 5] + scores[2, 6]) / 2)


def test_it_learns_a_text_and_says_it(learns: Callable[..., float], tmp_path: Path) -> None:
    torch.manual_seed(0)
    letters = dict(enumerate(["", *"abcdefgh"]))
    config = GPTTextGenerationConfig(**{**SMALL, "vocab_size": None, "initializer_range": 0.02}, id2label=letters)
    model = GPTTextGeneration(config)
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert model.config.vocab_size == 9
    assert learns(model, {"token_ids": text, "labels": text}, steps=120) < 0.1
    assert model.predict({"token_ids": text[:, :3]}, max_new_tokens=5)[0].text == "defgh"
    loaded = Model.load(model.save(tmp_path / "gpt"))
    assert_equal_weights(loaded, model)
    assert loaded.predict({"token_ids": text[:, :3]}, max_new_tokens=5)[0].text == "defgh"


def test_texts_are_read_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.train(["to be or not to be"], bos_token=None, eos_token="[EOS]")
    config = GPTTextGenerationConfig(
        **{**SMALL, "vocab_size": tokenizer.vocab_size}, eos_token_id=tokenizer.eos_token_id
    )
    model = GPTTextGeneration(config)
    model.preprocessor = tokenizer
    ids = tokenizer("not to be", return_tensors="torch")["token_ids"]
    labels = torch.cat([torch.tensor([[-100]]), ids, torch.tensor([[-100]])], dim=1)
    assert model.post_process(labels)[0].text == "not to be"
    (out,) = model.predict("to be", max_new_tokens=3, temperature=1.0)
    assert isinstance(out.text, str)
    model.preprocessor = None
    with pytest.raises(ConfigError, match=r"set model.preprocessor to a tokenizer"):
        model.post_process(labels)


def test_scores_are_read_as_the_likeliest_tokens(model: GPTTextGeneration) -> None:
    model.config.id2label = dict(enumerate(["", *"abcdefghijk"]))
    logits = model(torch.tensor([[3, 4]]))["logits"]
    assert model.post_process({"logits": logits}) == model.post_process(logits.argmax(-1))
    with pytest.raises(ConfigTypeError, match="got str"):
        model.post_process("abc")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": 14}, "prompt has 3 tokens, and 14 more are wanted; the model has positions for 16"),
    ],
)
def test_wrong_wishes_are_errors(model: GPTTextGeneration, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.generate(torch.tensor([[3, 4, 5]]), **how)


def test_without_a_wish_it_goes_on_as_far_as_the_config_and_the_positions_let_it(model: GPTTextGeneration) -> None:
    assert model.generate(torch.tensor([[3, 4, 5]])).shape == (1, 13)
    model.config.max_new_tokens = 2
    assert model.generate(torch.tensor([[3, 4, 5]])).shape == (1, 2)
