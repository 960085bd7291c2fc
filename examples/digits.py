"""A toy of two modalities: pictures of digits from scikit-learn, and their English names as text."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

NAMES = "zero one two three four five six seven eight nine".split()
LETTERS = sorted(set("".join(NAMES)))
BEGIN, END = len(LETTERS), len(LETTERS) + 1
LENGTH = 1 + max(map(len, NAMES))  # with the end
SEEN, WIDTH = 8, 32  # numbers that the language model sees of a picture, and its own width


class Eye(nn.Module):
    """Pictures [n, 64] to what the language model sees of them, [n, SEEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, SEEN))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers(pictures)


class Speaker(nn.Module):
    """A causal transformer layer: what is seen is the token before the text. Gives logits [n, LENGTH, letters]."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.letter = nn.Linear(SEEN, WIDTH), nn.Embedding(len(LETTERS) + 2, WIDTH)
        self.place = nn.Embedding(LENGTH + 1, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS) + 2)

    def forward(self, seen: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.see(seen)[:, None], self.letter(text)], 1) + self.place.weight
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))[:, 1:]


def spelled() -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target letters of the ten names, int64 [10, LENGTH] each; -100 after the end."""
    text, target = torch.full((10, LENGTH), END), torch.full((10, LENGTH), -100)
    for i, name in enumerate(NAMES):
        letters = [*map(LETTERS.index, name), END]
        target[i, : len(letters)] = torch.tensor(letters)
        text[i, : len(letters)] = torch.tensor([BEGIN, *letters[:-1]])
    return text, target


def load(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures and digits to learn from, then those held out (360)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures, digits = torch.tensor(data.data, dtype=dtype)[order] / 8 - 1, torch.tensor(data.target)[order]
    return pictures[360:], digits[360:], pictures[:360], digits[:360]
