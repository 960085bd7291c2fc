"""The baselines: known answers on synthetic text, and no learning from held-out bytes."""

import math

import numpy as np
import pytest

from funzero.cli.baselines import baselines, context_bits, lzma_bits, primed_lzma_bits

NAMES = {"byte trigram", "3-byte context", "lzma alone", "lzma primed"}


def random_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_random_bytes_cost_about_eight_bits() -> None:
    result = baselines(random_bytes(0, 200_000), random_bytes(1, 20_000))
    assert set(result) == NAMES
    assert context_bits(random_bytes(0, 200_000), random_bytes(1, 20_000))[0] == pytest.approx(8, abs=0.01)
    for name, bits in result.items():
        # Contexts seen once or twice make the counting models pay about a bit for chance repetitions.
        assert 7.99 < bits < (8.1 if "lzma" in name else 9.1), (name, bits)


def test_constant_text_costs_about_nothing() -> None:
    for name, bits in baselines(np.full(100_000, 97, np.uint8), np.full(20_000, 97, np.uint8)).items():
        assert 0 <= bits < 0.06, (name, bits)


def test_each_order_finds_the_structure_of_its_length() -> None:
    random = np.random.default_rng(2)
    text = [1, 2]
    for noise in random.integers(0, 2, 60_000):
        text.append((text[-2] + text[-1]) % 4 if noise else (text[-2] + text[-1] + 2) % 4)
    train, heldout = np.array(text[:50_000], np.uint8), np.array(text[50_000:], np.uint8)
    unigram, bigram, trigram, three = context_bits(train, heldout)
    # The parities repeat odd, odd, even; beside that, one bit of each byte is noise.
    assert unigram == pytest.approx(1 + math.log2(3) - 2 / 3, abs=0.01)
    assert bigram == pytest.approx(1 + 2 / 3, abs=0.01)
    assert trigram == pytest.approx(1, abs=0.01)
    assert three == pytest.approx(1, abs=0.02)


def test_smoothing_by_hand() -> None:
    train, heldout = np.array([5, 5, 6], np.uint8), np.array([5, 6, 7], np.uint8)
    # Order 0: three bytes seen, two kinds. Order 1, contexts 0 -> {5}, 5 -> {5, 6}, 6 never seen.
    low = {5: (2 + 2 / 256) / 5, 6: (1 + 2 / 256) / 5, 7: (2 / 256) / 5}
    high = [(1 + low[5]) / 2, (1 + 2 * low[6]) / 4, low[7]]
    unigram, bigram = context_bits(train, heldout, longest=1)
    assert unigram == pytest.approx(-sum(math.log2(low[b]) for b in (5, 6, 7)) / 3)
    assert bigram == pytest.approx(-sum(math.log2(p) for p in high) / 3)


def test_probabilities_of_all_next_bytes_sum_to_one() -> None:
    train = random_bytes(3, 400) % 5
    for context in ([1, 2, 3], [0, 4, 4], [77, 1, 2]):
        total = 0.0
        for byte in range(256):
            with_byte = context_bits(train, np.array([*context, byte], np.uint8))[3] * 4
            without = context_bits(train, np.array(context, np.uint8))[3] * 3
            total += 2.0 ** (without - with_byte)
        assert total == pytest.approx(1.0)


def test_heldout_bytes_teach_the_counting_models_nothing() -> None:
    """The cost of a byte must not depend on the held-out bytes around it beyond its own context."""
    train = random_bytes(4, 5_000) % 7
    block = np.concatenate([np.zeros(3, np.uint8), random_bytes(5, 300)])
    once, twice = context_bits(train, block), context_bits(train, np.tile(block, 20))
    assert twice == pytest.approx(once, rel=0.02)
    assert once[3] > 8


def test_heldout_bytes_are_paid_for_unless_the_training_text_has_them() -> None:
    fresh = random_bytes(6, 20_000)
    assert primed_lzma_bits(random_bytes(7, 100_000), fresh) > 7.9
    assert primed_lzma_bits(np.concatenate([fresh, random_bytes(7, 100_000)]), fresh) < 0.5
    assert lzma_bits(fresh) > 7.9


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="expected training and held-out bytes"):
        context_bits(np.zeros(0, np.uint8), np.zeros(4, np.uint8))
