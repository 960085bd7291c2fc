"""The corpus: which files are read, how they are split, and what a window holds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from funzero.cli.corpus import IGNORE, SEPARATOR, heldout_rows, is_heldout, load_corpus, sample_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(200):
        path = tmp_path / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {path.relative_to(tmp_path).as_posix()}\n")
    return tmp_path


def test_every_file_is_in_exactly_one_part_in_order_of_path(folder: Path) -> None:
    corpus = load_corpus(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    for part, held in ((corpus.train, False), (corpus.heldout, True)):
        expected = [f"# {name}\n".encode() for name in names if is_heldout(name) == held]
        assert part.dtype == np.uint8
        assert part.tobytes().split(bytes([SEPARATOR])) == [*expected, b""]
    assert corpus.train_files + corpus.heldout_files == len(names) == 200
    assert 2 <= corpus.heldout_files <= 25


def test_the_split_depends_on_the_relative_path_only(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("moved") / "deeper"
    folder.rename(moved)
    first = load_corpus(moved)
    moved.rename(folder)
    second = load_corpus(folder)
    assert first.heldout.tobytes() == second.heldout.tobytes()
    assert first.train.tobytes() == second.train.tobytes()


@pytest.mark.parametrize("skipped", ["test", "idlelib", "site-packages", "__pycache__", "package/tests"])
def test_skipped_folders_and_other_suffixes_are_left_out(folder: Path, skipped: str) -> None:
    before = load_corpus(folder)
    (folder / skipped / "inner").mkdir(parents=True)
    (folder / skipped / "inner" / "x.py").write_text("left_out = 1\n")
    (folder / "notes.txt").write_text("left out too")
    after = load_corpus(folder)
    assert after.train.tobytes() == before.train.tobytes()
    assert after.heldout.tobytes() == before.heldout.tobytes()


def test_the_standard_library_is_the_default() -> None:
    corpus = load_corpus()
    assert corpus.train_files > 200
    assert 0.02 < len(corpus.heldout) / (len(corpus.train) + len(corpus.heldout)) < 0.1


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder"):
        load_corpus(tmp_path / "absent")
    with pytest.raises(ValueError, match="expected at least one training file"):
        load_corpus(tmp_path)


def test_sample_rows_is_a_pure_function_of_seed_and_step() -> None:
    train = np.arange(200, dtype=np.uint8)
    state = np.random.get_state()[1].copy()
    rows = sample_rows(train, rows=5, length=16, seed=3, step=7)
    assert rows.dtype == torch.int64
    assert rows.shape == (5, 17)
    assert torch.equal(rows, sample_rows(train, rows=5, length=16, seed=3, step=7))
    assert torch.equal(rows, rows[:, :1] + torch.arange(17))
    assert not torch.equal(rows, sample_rows(train, rows=5, length=16, seed=3, step=8))
    assert not torch.equal(rows, sample_rows(train, rows=5, length=16, seed=4, step=7))
    assert np.array_equal(np.random.get_state()[1], state)


def test_sample_rows_reaches_the_first_and_the_last_byte_and_refuses_short_text() -> None:
    train = np.arange(10, dtype=np.uint8)
    rows = sample_rows(train, rows=200, length=8, seed=0, step=0)
    assert set(rows[:, 0].tolist()) == {0, 1}
    with pytest.raises(ValueError, match="expected more than length=10"):
        sample_rows(train, rows=1, length=10, seed=0, step=0)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 33])
def test_every_heldout_byte_is_scored_once_after_the_byte_before_it(size: int) -> None:
    heldout = np.random.default_rng(size).integers(1, 256, size).astype(np.uint8)
    tokens, labels = heldout_rows(heldout, length=8)
    assert tokens.shape == labels.shape == (-(-size // 8), 8)
    assert tokens.dtype == labels.dtype == torch.int64
    scored = labels != IGNORE
    assert labels[scored].tolist() == heldout.tolist()
    assert tokens[scored].tolist() == [SEPARATOR, *heldout[:-1].tolist()]
    assert scored.flatten().tolist() == [True] * size + [False] * (labels.numel() - size)


def test_heldout_rows_refuses_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="expected at least one byte"):
        heldout_rows(np.zeros(0, np.uint8), length=8)
