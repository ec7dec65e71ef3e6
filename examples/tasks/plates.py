"""Draw number plates with random size, slant, position and noise: images, and a CSV file for each split."""

import csv
import random
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

DIGITS, LETTERS = "۰۱۲۳۴۵۶۷۸۹", "بجدسصطقلمنوهی"
WIDTH, HEIGHT = 160, 40
FONT = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")  # comes with matplotlib


def write_plates(folder: Path, sizes: dict[str, int], seed: int = 0) -> None:
    """Write ``sizes["train"]`` plates and their ``train.csv``, and so on. No text occurs twice."""
    draw, used = random.Random(seed), set[str]()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["image_path", "label"])
            for number in range(size):
                text = next(t for t in iter(lambda: plate_text(draw), "") if t not in used)
                used.add(text)
                draw_plate(text, draw).save(folder / "images" / f"{split}_{number}.png")
                rows.writerow([f"{split}_{number}.png", text])


def plate_text(draw: random.Random) -> str:
    """Two digits, a letter and five digits."""
    digits = draw.choices(DIGITS, k=7)
    return "".join([*digits[:2], draw.choice(LETTERS), *digits[2:]])


def draw_plate(text: str, draw: random.Random) -> Image.Image:
    """Gray, 160 x 40 pixels. Characters are drawn one by one, so that no library joins or reorders them."""
    font = ImageFont.truetype(FONT, draw.randint(18, 25), layout_engine=ImageFont.Layout.BASIC)
    gap = draw.uniform(0, 3)
    width = sum(font.getlength(character) + gap for character in text)
    x, y = draw.uniform(2, WIDTH - width - 2), draw.uniform(1, 8)
    slope = draw.uniform(-3, 3) / WIDTH  # in pixels, from end to end
    paper, ink = draw.randint(170, 255), draw.randint(0, 70)
    plate = Image.new("L", (WIDTH, HEIGHT), paper)
    pen = ImageDraw.Draw(plate)
    for character in text:
        pen.text((x, y + slope * x), character, font=font, fill=ink)
        x += font.getlength(character) + gap
    noise = np.random.default_rng(draw.getrandbits(32)).normal(0, draw.uniform(2, 15), (HEIGHT, WIDTH))
    return Image.fromarray((np.asarray(plate) + noise).clip(0, 255).astype(np.uint8))
