"""`funzero plan`."""

import pytest
import torch

from funzero.cli.main import main

SMALL = ["plan", "--layers", "2", "--width", "128", "--heads", "4", "--kv-heads", "2", "--inner", "256"]
SMALL += ["--vocab", "512", "--context", "64"]


def tiny():
    """A model of a user's."""
    params = {"w": torch.empty(64, 64, device="meta")}
    return lambda p, b: (b @ p["w"]).square().sum(), params, torch.empty(8, 64, device="meta")


def wrong():
    """Not what a model is."""
    return 3


def test_it_fits(capsys, tmp_path):
    code = main([*SMALL, "--dp", "2", "--rows", "4", "--accumulate", "2", "--chart", str(tmp_path / "c.html")])
    out = capsys.readouterr().out
    assert code == 0 and "it fits" in out and "first rank of (dp=2)" in out
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")


def test_it_does_not_fit_and_something_is_proposed(capsys):
    code = main([*SMALL, "--dp", "2", "--rows", "8", "--stage", "0", "--device-memory", "6MB", "--host-memory", "1GB"])
    out = capsys.readouterr().out
    assert code == 1 and "it does not fit: device memory: needs" in out and "proposal: stage=" in out


def test_nothing_fits(capsys):
    code = main([*SMALL, "--dp", "2", "--device-memory", "100kB", "--host-memory", "1GB"])
    assert code == 1 and "no layout fits" in capsys.readouterr().out


def test_offload_and_a_model_of_ones_own(capsys, tmp_path):
    own = ["plan", "--model", "tests.cli.test_plan:tiny", "--dp", "4", "--folder", str(tmp_path), "--opt-state", "disk"]
    assert main([*own, "--params", "host"]) == 0
    out = capsys.readouterr().out
    assert "state on disk" in out and "state on host" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "no.such:thing"], "give an importable MODULE:FUNCTION"),
        (["--model", "tests.cli.test_plan:wrong"], "must return (loss_fn, params, batch)"),
        (["--width", "100", "--heads", "3"], "must be a multiple of --heads 3"),
        (["--rows", "3", "--accumulate", "2", *SMALL[1:]], "3 rows do not split into accumulate=2"),
    ],
)
def test_errors_are_one_line(capsys, arguments, text):
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1


def test_a_size_that_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--device-memory", "many"])
    assert "expected bytes such as 80GB" in capsys.readouterr().err
