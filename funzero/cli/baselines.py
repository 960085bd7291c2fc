"""What a model must beat: context-counting byte models and lzma, in bits per held-out byte."""

from __future__ import annotations

import lzma

import numpy as np

SMALLEST_DICTIONARY = 1 << 12
UNIFORM = 1.0 / 256.0


def baselines(train: np.ndarray, heldout: np.ndarray) -> dict[str, float]:
    """Bits per held-out byte of every baseline, by name. train, heldout: uint8 [n]."""
    by_order = context_bits(train, heldout, longest=3)
    return {
        "byte trigram": by_order[2],
        "3-byte context": by_order[3],
        "lzma alone": lzma_bits(heldout),
        "lzma primed": primed_lzma_bits(train, heldout),
    }


def context_bits(train: np.ndarray, heldout: np.ndarray, longest: int = 3) -> list[float]:
    """Bits per held-out byte of counting models with 0, 1, ... `longest` bytes of context (2 is the trigram).

    train, heldout: uint8 [n]. Counts come from `train` only. Each order is smoothed with the order below it
    (Witten-Bell): p(b | c) = (count(cb) + kinds(c) * lower(b)) / (count(c) + kinds(c)), where kinds(c) is the number
    of different bytes seen after c; below order 0 lies the uniform distribution. Before the first byte stand zeros.
    """
    if len(train) == 0 or len(heldout) == 0 or not 0 <= longest <= 3:
        raise ValueError(
            f"context_bits: expected training and held-out bytes and longest in 0..3, found {len(train)} and "
            f"{len(heldout)} bytes and longest={longest}; pass a corpus with both parts and longest <= 3"
        )
    bits: list[float] = []
    probability = np.full(len(heldout), UNIFORM)
    for order in range(longest + 1):
        asked = _grams(heldout, order)
        grams, counts = np.unique(_grams(train, order), return_counts=True)
        # The grams are sorted, so the grams of one context are neighbours and runs of `grams >> 8` are contexts.
        contexts, first, kinds = np.unique(grams >> 8, return_index=True, return_counts=True)
        seen = _look_up(grams, counts, asked)
        total = _look_up(contexts, np.add.reduceat(counts, first), asked >> 8)
        different = _look_up(contexts, kinds, asked >> 8)
        smoothed = (seen + different * probability) / np.maximum(total + different, 1)
        probability = np.where(total > 0, smoothed, probability)
        bits.append(float(-np.log2(probability).mean()))
    return bits


def lzma_bits(heldout: np.ndarray) -> float:
    """Bits per held-out byte when lzma (preset 9, extreme) sees nothing else. heldout: uint8 [n]."""
    size = len(lzma.compress(heldout.tobytes(), preset=9 | lzma.PRESET_EXTREME))
    return 8.0 * size / len(heldout)


def primed_lzma_bits(train: np.ndarray, heldout: np.ndarray) -> float:
    """Bits per held-out byte that lzma needs after the training text: size(train + heldout) - size(train)."""
    together = np.concatenate([train, heldout]).tobytes()
    dictionary = max(len(together), SMALLEST_DICTIONARY)
    grown = _lzma2_size(together, dictionary) - _lzma2_size(train.tobytes(), dictionary)
    return 8.0 * grown / len(heldout)


def _lzma2_size(text: bytes, dictionary: int) -> int:
    # With the preset's own dictionary a text longer than it would push the training text out of reach.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}]
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))


def _grams(text: np.ndarray, order: int) -> np.ndarray:
    """Each byte with the `order` bytes before it, as one number. text: uint8 [n]; returns uint32 [n]."""
    padded = np.concatenate([np.zeros(order, np.uint8), text]).astype(np.uint32)
    grams = np.zeros(len(text), np.uint32)
    for offset in range(order + 1):
        grams = (grams << np.uint32(8)) | padded[offset : offset + len(text)]
    return grams


def _look_up(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] == asked, else 0. keys: sorted [k]; values: [k]; asked: [n]; returns [n]."""
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)
